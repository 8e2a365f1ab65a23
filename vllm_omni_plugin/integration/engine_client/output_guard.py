"""AsyncLLM's loop of outputs, on which every answer depends, and what may not end it."""

from collections.abc import Callable, Sequence
from functools import wraps
from operator import length_hint
from typing import Any

from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


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
