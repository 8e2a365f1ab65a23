"""Ends one request with an error for its client."""

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError

from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    NoReplicaError,
    RanksUnknownError,
    RequestRefusedError,
    StageInputError,
)
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestFailed


def fail_request(output_processor: Any, failure: RequestFailed) -> list[str]:
    """Make AsyncLLM's `generate` raise the error; end all samples of the request's `n`, and return the others' ids.

    vLLM's finish reason "error" would become "Internal server error". AsyncLLM raises a `GracefulHTTPError` unchanged,
    with its status and message, also in streams.
    """
    state = output_processor.request_states.get(failure.request_id)
    if state is None:
        return []
    # The error replaces the last output, which `abort_requests` would put into the queue.
    queue, state.queue = state.queue, None
    others = forget_request(output_processor, failure.request_id)
    # Ends the task that sends the chunks of a session: its next one would begin a session without a client.
    queue.close()
    queue.put(to_http(failure.error))
    return others


def forget_request(output_processor: Any, request_id: str) -> list[str]:
    """End the request and all other samples of its `n` without an error. Returns as `fail_request` does."""
    state = output_processor.request_states.get(request_id)
    if state is None:
        return []
    root_id = state.parent_req.request_id if state.parent_req is not None else request_id
    ended: list[str] = output_processor.abort_requests([root_id], internal=True)
    return [other for other in ended if other != request_id]


def to_http(error: Exception) -> Exception:
    """The error as one that vLLM's server returns: its status (500 if it is none of ours) and message."""
    match error:
        case NoReplicaError():
            status = HTTPStatus.SERVICE_UNAVAILABLE
        case RequestRefusedError():
            status = HTTPStatus(error.status)
        case MessageTooLargeError():
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case RanksUnknownError():
            status = HTTPStatus.CONFLICT
        case StageInputError():
            status = HTTPStatus.BAD_REQUEST
        case _:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(str(error), status)  # type: ignore[no-any-return]
