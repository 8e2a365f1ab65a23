"""What the orchestrator tells AsyncLLM besides outputs: failures, replicas that come and go, news of other heads."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from msgspec.structs import replace
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_omni_plugin.admin.http_admission import DeferredResponse
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.engine_client.output_guard import guard_outputs, guard_statistics
from vllm_omni_plugin.integration.engine_client.request_failures import fail_request, forget_request
from vllm_omni_plugin.integration.engine_client.server_state_sync import ServerStateSync
from vllm_omni_plugin.integration.engine_client.stat_labels import StatLabels
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import EngineStateUpdate
from vllm_omni_plugin.orchestrator.pool.pool_member import engine_index
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    OutputUnusable,
    ReplicaJoined,
    ReplicaLeft,
    RequestFailed,
    RequestStages,
)
from vllm_omni_plugin.vllm_api.requests.ready import apply_ready_responses

if TYPE_CHECKING:
    from vllm_omni_plugin.integration.engine_client.request_tracing import RequestSpans

logger = init_logger(__name__)

_TEXT_IN_FRONT = "a"
"""An answer's first word keeps the space in front of it when it follows some text, as it does behind any prompt."""

FLEET_EVENTS = (RequestFailed, RequestStages, ReplicaJoined, ReplicaLeft, EngineStateUpdate)
"""What the orchestrator says that is no output."""


class FleetEventHandler:
    """Changes AsyncLLM's parts as the fleet changes. Lives on AsyncLLM's loop.

    Args:
        stages: of the fleet.
        vllm_config: AsyncLLM's configuration, brought in line with what the engines found at their start.
        ready_responses: what the local engines said of themselves, by stage and in the order of their ids.
        abort: aborts all that is done for requests, by AsyncLLM's ids.
        complain: tells the orchestrator of an output that cannot be processed.

    Attributes:
        kv_event_sources: the KV-event publisher of each engine that has one, by engine index.
        peer: follows what other heads were told.
        spans: of traced requests; None if none are.
        answers: those over HTTP that requests are for, by the request's id; who makes an answer keeps it.
        sender: index of the engine whose outputs AsyncLLM was given last.
    """

    def __init__(
        self,
        stages: FleetStages,
        vllm_config: Any,
        ready_responses: Sequence[list[bytes]],
        abort: Callable[[Sequence[str]], None],
        complain: Callable[[OutputUnusable], None],
    ) -> None:
        self._stages = stages
        self._vllm_config = vllm_config
        self._abort = abort
        self._complain = complain
        self.answers: WeakValueDictionary[str, DeferredResponse] = WeakValueDictionary()
        self.sender = 0
        self._configured: set[int] = set()
        self._output_processor: Any = None
        self._labels: StatLabels | None = None
        self.kv_event_sources: dict[int, Any] = {}
        self.peer = ServerStateSync()
        self.spans: RequestSpans | None = None
        for stage_id, responses in enumerate(ready_responses):
            self._configure(stage_id, responses)

    def bind(self, output_processor: Any, logger_manager: Any, policies: Sequence[str]) -> None:
        """AsyncLLM's parts exist by now: what ends and traces requests, what counts them.

        Args:
            output_processor: AsyncLLM's.
            logger_manager: likewise; None if nothing is counted.
            policies: names of the policies, by stage.
        """
        self._output_processor = output_processor
        guard_outputs(output_processor, self._output_failed)
        if self._stages.front_tokenizer is not None:
            decode_with(output_processor, self._stages.front_tokenizer())
        if output_processor.tracing_enabled:
            # OpenTelemetry need not be there.
            from vllm_omni_plugin.integration.engine_client.request_tracing import RequestSpans

            self.spans = RequestSpans(output_processor, policies)
        self.peer.loggers = logger_manager
        if logger_manager is not None:
            guard_statistics(logger_manager)
            self._labels = StatLabels(logger_manager)

    def handle(self, item: Any) -> None:
        """Deal with one of `FLEET_EVENTS`."""
        try:
            match item:
                case RequestFailed():
                    self._fail(item)
                case RequestStages():
                    if self.spans is not None:
                        self.spans.stages_ended(item)
                case ReplicaJoined() | ReplicaLeft():
                    self._replica_changed(item)
                case EngineStateUpdate():
                    self.peer.apply(item)
        except Exception:
            # AsyncLLM's loop would end of it, and every answer with it.
            logger.exception("%s could not be dealt with.", type(item).__name__)

    def forget(self, request_id: str) -> None:
        """AsyncLLM gives up a request that it has not handed over."""
        self._abort([request_id, *forget_request(self._output_processor, request_id)])

    def _fail(self, failure: RequestFailed) -> None:
        answer = self.answers.get(failure.request_id)
        if answer is None or not answer.refuse(failure.error):
            self._abort(fail_request(self._output_processor, failure))
            return
        # Nothing of the answer is sent, and vLLM would log the error of a stream with its traceback.
        for request_id in answer.request_ids:
            self.forget(request_id)

    def _output_failed(self, request_id: str, error: Exception) -> None:
        logger.error("Request %s fails, since vLLM cannot process its output.", request_id, exc_info=error)
        what = f"{type(error).__name__}: {error}"
        failure = RequestFailed(request_id, OmniError(f"The model's output could not be processed: {what}"))
        # In this order, since the request must not move with those beside it.
        self._abort([request_id, *fail_request(self._output_processor, failure)])
        self._complain(OutputUnusable(request_id, self.sender, what))

    def _replica_changed(self, change: ReplicaJoined | ReplicaLeft) -> None:
        if isinstance(change, ReplicaJoined):
            self._configure(change.stage_id, [change.ready_response])
        if self._labels is not None:
            label = self._labels.add if isinstance(change, ReplicaJoined) else self._labels.remove
            label(engine_index(change.stage_id, change.replica_id))

    def _configure(self, stage_id: int, ready_responses: list[bytes]) -> None:
        """Complete the configurations of a stage with what its first engines found at their start.

        Its replicas have one configuration, which must not be counted twice: those that come later add nothing to it.
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
    """Make AsyncLLM's `OutputProcessor` read the tokens of answers with this tokenizer.

    vLLM begins to read an answer with the tokens of the prompt, which mean something else to this tokenizer.
    """
    own_add_request = output_processor.add_request
    # Its own copy: tokenizers cannot be used by several threads at once.
    own_tokenizer = output_processor.tokenizer = deepcopy(tokenizer)
    in_front = own_tokenizer.encode(_TEXT_IN_FRONT, add_special_tokens=False)

    @wraps(own_add_request)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        is_new = request.request_id not in output_processor.request_states
        own_add_request(request, *args, **kwargs)
        if is_new and request.sampling_params is not None and request.sampling_params.detokenize:
            output_processor.request_states[request.request_id].detokenizer = IncrementalDetokenizer.from_new_request(
                own_tokenizer, replace(request, prompt_token_ids=in_front, prompt_embeds=None)
            )

    output_processor.add_request = add_request
