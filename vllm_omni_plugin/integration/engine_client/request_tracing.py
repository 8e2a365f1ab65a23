"""Where requests went, as attributes of the spans that vLLM makes of them, and their stages as spans below."""

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import Dispatches, RequestStages, StageTimes


@dataclass
class _PendingSpan:
    """A span that vLLM is about to make: what we add, and once it is made what names it."""

    attributes: Mapping[str, str | int]
    span: trace.SpanContext | None = None


_making: ContextVar[_PendingSpan | None] = ContextVar("omni_making", default=None)


class RequestSpans:
    """Keeps where traced requests went for as long as vLLM keeps the requests.

    vLLM makes and ends its span of a request in one call when its answer has ended; stages may go on after that. In a
    pipeline each stage gets a span `omni.stage` with the attributes `omni.stage`, `omni.stage_id`, and
    `omni.<part>_seconds` for what its time went into.

    Args:
        output_processor: AsyncLLM's; its spans get the attributes `omni.replica`, `omni.policy`, `omni.reason`,
            `omni.fallback` and `omni.matched_tokens`. A request through several stages has the last replica and
            decision of each, in the order of their first dispatch and with commas between; its matched tokens add up.
        policies: names of the policies, by stage.
    """

    def __init__(self, output_processor: Any, policies: Sequence[str]) -> None:
        self._output_processor = output_processor
        self._policies = policies
        self._tracer = trace.get_tracer(__name__)
        self._dispatches: WeakKeyDictionary[Any, Dispatches] = WeakKeyDictionary()
        # Stages of requests whose span is still to come. vLLM makes none of a request that was aborted.
        self._stages: WeakKeyDictionary[Any, RequestStages] = WeakKeyDictionary()
        # Spans of requests whose stages are still to come, as they always do.
        self._parents: dict[str, trace.SpanContext] = {}
        self._own_do_tracing = output_processor.do_tracing
        output_processor.do_tracing = self._do_tracing
        provider = trace.get_tracer_provider()
        # vLLM sets the SDK's; at another kind there is nothing to hear.
        if isinstance(provider, TracerProvider):
            provider.add_span_processor(_SpanAnnotator())

    def expect(self, request_id: str, dispatches: Dispatches | None) -> Dispatches:
        """The span of this request, which AsyncLLM has registered, shall tell of its dispatches.

        Args:
            request_id: AsyncLLM's id.
            dispatches: a list that others read, too; None for a new one.

        Returns:
            The list to fill.
        """
        dispatches = [] if dispatches is None else dispatches
        state = self._output_processor.request_states.get(request_id)
        if state is not None:
            # Further chunks of a session belong to the dispatch of the first one.
            self._dispatches.setdefault(state, dispatches)
        return dispatches

    def stages_ended(self, stages: RequestStages) -> None:
        """A request has ended in all stages of its pipeline. With one stage, vLLM's span says it all."""
        if len(self._policies) == 1:
            return
        parent = self._parents.pop(stages.request_id, None)
        if parent is not None:
            self._make_spans(stages, parent)
        elif (state := self._output_processor.request_states.get(stages.request_id)) is not None:
            self._stages[state] = stages

    def _do_tracing(self, output: Any, state: Any, stats: Any) -> None:
        dispatches = self._dispatches.get(state)
        making = _PendingSpan(self._attributes_of(dispatches))
        token = _making.set(making)
        try:
            self._own_do_tracing(output, state, stats)
        finally:
            _making.reset(token)
        if making.span is None or dispatches is None or len(self._policies) == 1:
            return
        stages = self._stages.pop(state, None)
        if stages is None:
            self._parents[state.request_id] = making.span
        else:
            self._make_spans(stages, making.span)

    def _attributes_of(self, dispatches: Dispatches | None) -> Mapping[str, str | int]:
        if not dispatches:
            return {}
        last = {replica.partition(".")[0]: (replica, decision) for replica, decision in dispatches}
        return {
            "omni.replica": ", ".join(replica for replica, _ in last.values()),
            "omni.policy": ", ".join(self._policies[int(stage_id)] for stage_id in last),
            "omni.reason": ", ".join(decision.reason for _, decision in last.values()),
            "omni.fallback": ", ".join(decision.fallback for _, decision in last.values() if decision.fallback),
            "omni.matched_tokens": sum(decision.matched_tokens for _, decision in last.values()),
        }

    def _make_spans(self, stages: RequestStages, parent: trace.SpanContext) -> None:
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        offset = time.time() - time.monotonic()
        for times in stages.stages:
            self._make_span(times, context, offset)

    def _make_span(self, times: StageTimes, context: Context, offset: float) -> None:
        span = self._tracer.start_span("omni.stage", context, start_time=_nanoseconds(times.began_at + offset))
        span.set_attribute("omni.stage", times.stage)
        span.set_attribute("omni.stage_id", times.stage_id)
        for part, seconds in times.parts.items():
            span.set_attribute(f"omni.{part}_seconds", seconds)
        span.end(_nanoseconds(times.ended_at + offset))


class _SpanAnnotator(SpanProcessor):
    """Notes and completes the span that vLLM makes of a request: vLLM gives away none of its own."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        making = _making.get()
        if making is not None:
            making.span = span.get_span_context()
            span.set_attributes(making.attributes)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
