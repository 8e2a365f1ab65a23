"""What the stages of a pipeline did for a request, as spans below the one that vLLM makes of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from vllm_omni_plugin.orchestrator.messages import RequestStages, StageTimes

_made: ContextVar["list[trace.SpanContext] | None"] = ContextVar("omni_spans_made", default=None)


class StageSpans:
    """Brings together, in whatever order they come, vLLM's span of a request and the times of its stages.

    vLLM makes and ends its span in one call when its answer has ended; stages may go on after that. Each stage gets a
    span `omni.stage` with the attributes `omni.stage`, `omni.stage_id`, and `omni.<part>_seconds` for what its time
    went into.
    """

    def __init__(self) -> None:
        _listen()
        self._tracer = trace.get_tracer(__name__)
        # Stages of requests whose span is still to come. vLLM makes none of a request that was aborted.
        self._stages: WeakKeyDictionary[Any, RequestStages] = WeakKeyDictionary()
        # Spans of requests whose stages are still to come, as they always do.
        self._parents: dict[str, trace.SpanContext] = {}

    @contextmanager
    def around_vllms(self, request_id: str, state: Any, whole: bool) -> Iterator[None]:
        """In this context vLLM makes the span of a request.

        Args:
            request_id: AsyncLLM's id.
            state: AsyncLLM's state of it.
            whole: whether `ended` is or will be called for it.
        """
        made: list[trace.SpanContext] = []
        token = _made.set(made)
        try:
            yield
        finally:
            _made.reset(token)
        if not made or not whole:
            return
        known = self._stages.pop(state, None)
        if known is None:
            self._parents[request_id] = made[0]
        else:
            self._tell(known, made[0])

    def ended(self, stages: RequestStages, state: Any | None) -> None:
        """A request has ended in all its stages.

        Args:
            stages: what they did.
            state: AsyncLLM's state of it, None if that has ended.
        """
        parent = self._parents.pop(stages.request_id, None)
        if parent is not None:
            self._tell(stages, parent)
        elif state is not None:
            self._stages[state] = stages

    def _tell(self, stages: RequestStages, parent: trace.SpanContext) -> None:
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        offset = time.time() - time.monotonic()
        for times in stages.stages:
            self._span(times, context, offset)

    def _span(self, times: StageTimes, context: Context, offset: float) -> None:
        span = self._tracer.start_span("omni.stage", context, start_time=_nanoseconds(times.began_at + offset))
        span.set_attribute("omni.stage", times.stage)
        span.set_attribute("omni.stage_id", times.stage_id)
        for part, seconds in times.parts.items():
            span.set_attribute(f"omni.{part}_seconds", seconds)
        span.end(_nanoseconds(times.ended_at + offset))


class _Listener(SpanProcessor):
    """Notes the spans that are made where somebody wants to know: vLLM gives away none of its own."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        made, context = _made.get(), span.get_span_context()
        if made is not None and context is not None:
            made.append(context)


def _listen() -> None:
    """Listen at the tracer provider that vLLM has set; at another kind than the SDK's there is nothing to hear."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.add_span_processor(_Listener())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
