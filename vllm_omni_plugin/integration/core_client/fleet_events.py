"""Handles the orchestrator's messages that are not outputs: failures, joined or lost replicas, calls of other heads."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from msgspec.structs import replace
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_omni_plugin.admin.http_admission import DeferredResponse
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.core_client.output_guard import guard_outputs, guard_statistics
from vllm_omni_plugin.integration.core_client.request_failures import fail_request, forget_request
from vllm_omni_plugin.integration.core_client.server_state_sync import ServerStateSync
from vllm_omni_plugin.integration.core_client.stat_labels import StatLabels
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import AbortedElsewhere, EngineStateUpdate, complete
from vllm_omni_plugin.orchestrator.pool.pool_member import engine_index
from vllm_omni_plugin.orchestrator.requests import orchestrator_messages as messages
from vllm_omni_plugin.vllm_api.engine_messages.ready import apply_ready_responses

if TYPE_CHECKING:
    from vllm_omni_plugin.integration.core_client.request_tracing import RequestSpans

logger = init_logger(__name__)

_TEXT_IN_FRONT = "a"
"""Decoding after some text keeps the space in front of the first word of a response."""

FLEET_EVENTS = (
    messages.RequestFailed,
    messages.RequestStages,
    messages.ReplicaJoined,
    messages.ReplicaLeft,
    EngineStateUpdate,
    AbortedElsewhere,
)
"""The messages in the orchestrator's output queue that are not outputs."""


class FleetEventHandler:
    """Applies events of the orchestrator to AsyncLLM's parts. Used on AsyncLLM's loop.

    `abort` takes AsyncLLM's ids; `kv_event_sources` are by engine index; `report_unusable` reports an output that
    cannot be processed to the orchestrator. `sender` is the engine index of the outputs that AsyncLLM processes now.
    The handlers of `responses`, by request id, hold the only strong references to them. `spans` is None without
    tracing.
    """

    def __init__(
        self,
        stages: FleetStages,
        vllm_config: Any,
        ready_responses: Sequence[list[bytes]],
        abort: Callable[[Sequence[str]], None],
        report_unusable: Callable[[messages.OutputUnusable], None],
    ) -> None:
        self._stages = stages
        self._vllm_config = vllm_config
        self._abort = abort
        self._report_unusable = report_unusable
        self.responses: WeakValueDictionary[str, DeferredResponse] = WeakValueDictionary()
        self.sender = 0
        self._configured: set[int] = set()
        self._output_processor: Any = None
        self._labels: StatLabels | None = None
        self.kv_event_sources: dict[int, Any] = {}
        self.server_state = ServerStateSync()
        self.spans: RequestSpans | None = None
        for stage_id, responses in enumerate(ready_responses):
            self._configure(stage_id, responses)

    def bind(self, output_processor: Any, logger_manager: Any, policies: Sequence[str]) -> None:
        """Pass AsyncLLM's parts, and the policies' names by stage. `logger_manager` is None if statistics are off."""
        self._output_processor = output_processor
        guard_outputs(output_processor, self._output_failed)
        if self._stages.answer_tokenizer is not None:
            decode_with(output_processor, self._stages.answer_tokenizer())
        if output_processor.tracing_enabled:
            # OpenTelemetry is an optional dependency.
            from vllm_omni_plugin.integration.core_client.request_tracing import RequestSpans

            self.spans = RequestSpans(output_processor, policies)
        self.server_state.loggers = logger_manager
        if logger_manager is not None:
            guard_statistics(logger_manager)
            self._labels = StatLabels(logger_manager)

    def handle(self, item: Any) -> None:
        try:
            match item:
                case messages.RequestFailed():
                    self._fail(item)
                case messages.RequestStages():
                    if self.spans is not None:
                        self.spans.stages_ended(item)
                case messages.ReplicaJoined() | messages.ReplicaLeft():
                    self._replica_changed(item)
                case EngineStateUpdate():
                    self.server_state.apply(item)
                case AbortedElsewhere():
                    self._abort_for_operator(item)
        except Exception:
            # An exception would end AsyncLLM's output loop, and with it every response.
            logger.exception("%s could not be handled.", type(item).__name__)

    def forget(self, request_id: str) -> None:
        """Remove a request that AsyncLLM has registered, without an error to its client."""
        self._abort([request_id, *forget_request(self._output_processor, request_id)])

    def _fail(self, failure: messages.RequestFailed) -> None:
        """End a failed request; if nothing was sent yet, the middleware sends its error as the status."""
        response = self.responses.get(failure.request_id)
        if response is None or not response.refuse(failure.error):
            # The request itself too: a chunk that its client sent before this error has begun it anew.
            self._abort([failure.request_id, *fail_request(self._output_processor, failure)])
            return
        for request_id in response.request_ids:
            self.forget(request_id)

    def _abort_for_operator(self, item: AbortedElsewhere) -> None:
        """Abort the given requests, or all if none is given, and say that it is done."""
        processor = self._output_processor
        if item.request_ids:
            aborted = processor.abort_requests(item.request_ids, internal=False)
        else:
            every = [*processor.request_states, *processor.parent_requests]
            aborted = processor.abort_requests(every, internal=True)
        self._abort(aborted)
        complete(item.applied)

    def _output_failed(self, request_id: str, error: BaseException) -> None:
        logger.error("Request %s fails, because vLLM cannot process its output.", request_id, exc_info=error)
        what = f"{type(error).__name__}: {error}"
        failure = messages.RequestFailed(request_id, OmniError(f"The model's output could not be processed: {what}"))
        # Abort first: the report may make the replica's requests move, and this one must not.
        self._abort([request_id, *fail_request(self._output_processor, failure)])
        self._report_unusable(messages.OutputUnusable(request_id, self.sender, what))

    def _replica_changed(self, change: messages.ReplicaJoined | messages.ReplicaLeft) -> None:
        if isinstance(change, messages.ReplicaJoined):
            self._configure(change.stage_id, [change.ready_response])
        if self._labels is not None:
            label = self._labels.add if isinstance(change, messages.ReplicaJoined) else self._labels.remove
            label(engine_index(change.stage_id, change.replica_id))

    def _configure(self, stage_id: int, ready_responses: list[bytes]) -> None:
        """Set the values that the first engines of a stage have determined in its configurations.

        Only once for each stage, because `apply_ready_responses` adds numbers of KV blocks up.
        """
        if not ready_responses or stage_id in self._configured:
            return
        self._configured.add(stage_id)
        own = self._stages.configs[stage_id]
        if stage_id == self._stages.prompt_stage:
            self.kv_event_sources = apply_ready_responses(self._vllm_config, ready_responses)
        if own is not None and own is not self._vllm_config:
            apply_ready_responses(own, ready_responses)


def decode_with(output_processor: Any, tokenizer: Any) -> None:
    """Make AsyncLLM's `OutputProcessor` decode responses with this tokenizer, which is not that of the prompt.

    vLLM starts decoding a response with the last tokens of the prompt. They are replaced by tokens of this tokenizer.
    """
    own_add_request = output_processor.add_request
    # A copy, because several threads cannot use a tokenizer at once.
    own_tokenizer = output_processor.tokenizer = deepcopy(tokenizer)
    prefix = own_tokenizer.encode(_TEXT_IN_FRONT, add_special_tokens=False)

    @wraps(own_add_request)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        is_new = request.request_id not in output_processor.request_states
        own_add_request(request, *args, **kwargs)
        if is_new and request.sampling_params is not None and request.sampling_params.detokenize:
            output_processor.request_states[request.request_id].detokenizer = IncrementalDetokenizer.from_new_request(
                own_tokenizer, replace(request, prompt_token_ids=prefix, prompt_embeds=None)
            )

    output_processor.add_request = add_request
