"""Where requests went, as attributes of the spans that vLLM makes of them."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.engine import output_processor as vllm_output_processor

from vllm_omni_plugin.orchestrator.messages import Dispatches, RequestStages

_OPEN = "_vllm_omni_plugin_tracing"

_attributes: ContextVar[Mapping[str, str | int]] = ContextVar("omni_attributes", default={})  # noqa: B039 (read only)


def open_tracing() -> None:
    """Make vLLM's `OutputProcessor` add our attributes to its spans from now on. Idempotent.

    It makes a span in one go when the request ends, and tells nobody of it before.
    """
    own = vllm_output_processor.instrument_manual
    if hasattr(own, _OPEN):
        return

    @wraps(own)
    def instrument_manual(*args: Any, attributes: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        return own(*args, attributes={**(attributes or {}), **_attributes.get()}, **kwargs)

    setattr(instrument_manual, _OPEN, True)
    vllm_output_processor.instrument_manual = instrument_manual


class RequestSpans:
    """Keeps where traced requests went for as long as vLLM keeps the requests.

    Args:
        output_processor: AsyncLLM's; its spans get the attributes `omni.replica`, `omni.policy`, `omni.reason`,
            `omni.fallback` and `omni.matched_tokens`. A request through several stages has the last replica and
            decision of each, in the order of their first dispatch and with commas between; its matched tokens add up.
        policies: names of the policies, by stage.
    """

    def __init__(self, output_processor: Any, policies: Sequence[str]) -> None:
        from vllm_omni_plugin.integration.stage_spans import StageSpans

        self._output_processor = output_processor
        self._policies = policies
        self._dispatches: WeakKeyDictionary[Any, Dispatches] = WeakKeyDictionary()
        # With one stage, vLLM's span says it all.
        self._stages = StageSpans() if len(policies) > 1 else None
        self._own_do_tracing = output_processor.do_tracing
        open_tracing()
        output_processor.do_tracing = self._do_tracing

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
        """A request has ended in all stages of its pipeline, which get spans of their own below its span."""
        if self._stages is not None:
            self._stages.ended(stages, self._output_processor.request_states.get(stages.request_id))

    def _do_tracing(self, output: Any, state: Any, stats: Any) -> None:
        dispatches = self._dispatches.get(state)
        token = _attributes.set(self._attributes_of(dispatches))
        try:
            if self._stages is None:
                self._own_do_tracing(output, state, stats)
                return
            with self._stages.around_vllms(state.request_id, state, whole=dispatches is not None):
                self._own_do_tracing(output, state, stats)
        finally:
            _attributes.reset(token)

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
