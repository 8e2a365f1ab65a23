"""Ending one request with an error that its API user sees, while everything else goes on."""

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError

from vllm_omni_plugin.errors import MessageTooLargeError, NoReplicaError, RequestRefusedError, StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestFailed


def fail_request(output_processor: Any, failure: RequestFailed) -> list[str]:
    """Put a request's error where AsyncLLM's `generate` waits for its next output, and end all samples of its `n`.

    An engine can only end a request with the finish reason "error", which vLLM's server words "Internal server error".
    AsyncLLM re-raises a `GracefulHTTPError` as it is, with status and message, in streams too.

    Returns:
        Ids of the other samples, which still run in engines.
    """
    state = output_processor.request_states.get(failure.request_id)
    if state is None:
        return []
    # Nobody wants its last output, which an error replaces and which perhaps cannot be made.
    queue, state.queue = state.queue, None
    others = forget_request(output_processor, failure.request_id)
    queue.put(to_http(failure.error))
    return others


def forget_request(output_processor: Any, request_id: str) -> list[str]:
    """End the request without a word, and all other samples of its `n`. Returns as `fail_request` does."""
    state = output_processor.request_states.get(request_id)
    if state is None:
        return []
    root_id = state.parent_req.request_id if state.parent_req is not None else request_id
    ended: list[str] = output_processor.abort_requests([root_id], internal=True)
    return [other for other in ended if other != request_id]


def to_http(error: Exception) -> Exception:
    """The error in the form that vLLM's server answers with its status and message."""
    match error:
        case NoReplicaError():
            status = HTTPStatus.SERVICE_UNAVAILABLE
        case RequestRefusedError():
            status = HTTPStatus(error.status)
        case MessageTooLargeError():
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case StageInputError():
            status = HTTPStatus.BAD_REQUEST
        case _:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(str(error), status)  # type: ignore[no-any-return]
