"""Adds the replica and the decision to vLLM's span of a request, and child spans for the stages of a pipeline."""

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ChosenReplicas, RequestStages, StageTimes


@dataclass
class _PendingSpan:
    attributes: Mapping[str, str | int]
    span: trace.SpanContext | None = None


_pending: ContextVar[_PendingSpan | None] = ContextVar("omni_pending_span", default=None)


class RequestSpans:
    """Adds attributes to the spans of vLLM's `OutputProcessor`, and spans of stages.

    A request's span gets `omni.replica`, `omni.policy`, `omni.reason`, `omni.fallback` and `omni.matched_tokens`. With
    several stages these are the values of the last replica in each stage, separated by commas, and the sum of the
    tokens. In a pipeline each stage gets a span `omni.stage` with `omni.stage`, `omni.stage_id` and
    `omni.<part>_seconds`. vLLM starts and ends its span in one call when the response ends; stages may end later.
    """

    def __init__(self, output_processor: Any, policies: Sequence[str]) -> None:
        self._output_processor = output_processor
        self._policies = policies
        self._tracer = trace.get_tracer(__name__)
        self._chosen_replicas: WeakKeyDictionary[Any, ChosenReplicas] = WeakKeyDictionary()
        # Ended stages of requests whose span is not made yet. vLLM makes no span for an aborted request.
        self._stages: WeakKeyDictionary[Any, RequestStages] = WeakKeyDictionary()
        # Spans of requests whose stages have not ended yet.
        self._parents: dict[str, trace.SpanContext] = {}
        self._original_do_tracing = output_processor.do_tracing
        output_processor.do_tracing = self._do_tracing
        provider = trace.get_tracer_provider()
        # vLLM sets a provider of the SDK. Other kinds have no span processors.
        if isinstance(provider, TracerProvider):
            provider.add_span_processor(_SpanAnnotator())

    def expect(self, request_id: str, chosen_replicas: ChosenReplicas | None) -> ChosenReplicas:
        """Trace where a registered request is sent. Returns the list to fill: the given one or a new one."""
        chosen_replicas = [] if chosen_replicas is None else chosen_replicas
        state = self._output_processor.request_states.get(request_id)
        if state is not None:
            # Further chunks of a streaming session are sent to the replica of the first.
            self._chosen_replicas.setdefault(state, chosen_replicas)
        return chosen_replicas

    def stages_ended(self, stages: RequestStages) -> None:
        """A request has ended in all stages. With a single stage, vLLM's span is enough."""
        if len(self._policies) == 1:
            return
        parent = self._parents.pop(stages.request_id, None)
        if parent is not None:
            self._make_spans(stages, parent)
        elif (state := self._output_processor.request_states.get(stages.request_id)) is not None:
            self._stages[state] = stages

    def _do_tracing(self, output: Any, state: Any, stats: Any) -> None:
        chosen_replicas = self._chosen_replicas.get(state)
        pending = _PendingSpan(self._attributes_of(chosen_replicas))
        token = _pending.set(pending)
        try:
            self._original_do_tracing(output, state, stats)
        finally:
            _pending.reset(token)
        if pending.span is None or chosen_replicas is None or len(self._policies) == 1:
            return
        stages = self._stages.pop(state, None)
        if stages is None:
            self._parents[state.request_id] = pending.span
        else:
            self._make_spans(stages, pending.span)

    def _attributes_of(self, chosen_replicas: ChosenReplicas | None) -> Mapping[str, str | int]:
        if not chosen_replicas:
            return {}
        last = {replica.partition(".")[0]: (replica, decision) for replica, decision in chosen_replicas}
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
    """Adds the attributes when vLLM starts the span of a request, to which vLLM gives no other access."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pending = _pending.get()
        if pending is not None:
            pending.span = span.get_span_context()
            span.set_attributes(pending.attributes)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
