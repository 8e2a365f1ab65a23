"""Keeps errors of single outputs and statistics from ending AsyncLLM's output loop."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from operator import length_hint
from typing import Any

from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


def guard_outputs(output_processor: Any, fail: Callable[[str, BaseException], None]) -> None:
    """Make an output that vLLM's `OutputProcessor` cannot process `fail` only its own request."""
    original = output_processor.process_outputs
    states = output_processor.request_states

    @wraps(original)
    def process_outputs(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        rest, stopped = _Outputs(outputs), []
        while True:
            try:
                processed = original(rest, *args, **kwargs)
            except BaseException as error:  # a panic of a tokenizer's Rust code is no `Exception`
                end = rest.read
                if not end or isinstance(error, KeyboardInterrupt):
                    raise
                # Requests that have reached a stop string: the engine must still abort them.
                done = [output for output in rest[: end - 1] if output.finish_reason is None]
                stopped += [output.request_id for output in done if output.request_id not in states]
                fail(rest[end - 1].request_id, error)
                rest = _Outputs(rest[end:])
            else:
                processed.reqs_to_abort[:0] = stopped
                return processed

    output_processor.process_outputs = process_outputs


class _Outputs(list[Any]):
    """Outputs that vLLM consumes one by one, so that its last iterator shows which of them raised an error."""

    _iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._iterator = super().__iter__()
        return self._iterator

    @property
    def read(self) -> int:
        """How many outputs the last iterator has yielded; 0 without one."""
        return 0 if self._iterator is _Outputs._iterator else len(self) - length_hint(self._iterator)


def guard_statistics(logger_manager: Any) -> None:
    """Make statistics that vLLM's loggers cannot process cause only a log line."""
    original = logger_manager.record
    logged: set[int | None] = set()

    @wraps(original)
    def record(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except Exception:
            engine = kwargs.get("engine_idx")
            log = logger.debug if engine in logged else logger.error
            logged.add(engine)
            log("Statistics of engine %s cannot be processed and are dropped.", engine, exc_info=True)

    logger_manager.record = record
