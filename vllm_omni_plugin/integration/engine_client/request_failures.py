"""Ending one request with an error that its API user sees, while everything else goes on: AsyncLLM's loop of outputs,
on which every answer depends, too."""

from collections.abc import Callable, Sequence
from functools import wraps
from http import HTTPStatus
from operator import length_hint
from typing import Any

from vllm.exceptions import GracefulHTTPError

from vllm_omni_plugin.errors import MessageTooLargeError, NoReplicaError, StageInputError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestFailed

logger = init_logger(__name__)


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
        case MessageTooLargeError():
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case StageInputError():
            status = HTTPStatus.BAD_REQUEST
        case _:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(str(error), status)  # type: ignore[no-any-return]


def guard_outputs(output_processor: Any, fail: Callable[[str, Exception], None]) -> None:
    """Let an output that vLLM's `OutputProcessor` cannot process fail its request, and no other.

    Args:
        output_processor: AsyncLLM's.
        fail: called with a request's id and what was raised over it.
    """
    own = output_processor.process_outputs
    states = output_processor.request_states

    @wraps(own)
    def process_outputs(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        # It takes one after the other, so what is left of them tells which one it has failed over.
        rest, begin, stopped = iter(outputs), 0, []
        while True:
            try:
                processed = own(rest, *args, **kwargs)
            except Exception as error:
                end = len(outputs) - length_hint(rest)
                if end == begin:
                    raise
                # Requests whose stop string had come by then, of which the engine does not know.
                done = [output for output in outputs[begin : end - 1] if output.finish_reason is None]
                stopped += [output.request_id for output in done if output.request_id not in states]
                fail(outputs[end - 1].request_id, error)
                begin = end
            else:
                processed.reqs_to_abort[:0] = stopped
                return processed

    output_processor.process_outputs = process_outputs


def guard_statistics(logger_manager: Any) -> None:
    """Let statistics that vLLM's loggers cannot take be lost, and nothing else.

    Args:
        logger_manager: AsyncLLM's.
    """
    own = logger_manager.record
    complained: set[int | None] = set()

    @wraps(own)
    def record(*args: Any, **kwargs: Any) -> None:
        try:
            own(*args, **kwargs)
        except Exception:
            engine = kwargs.get("engine_idx")
            log = logger.debug if engine in complained else logger.error
            complained.add(engine)
            log("Statistics of engine %s cannot be counted, and are left out.", engine, exc_info=True)

    logger_manager.record = record
