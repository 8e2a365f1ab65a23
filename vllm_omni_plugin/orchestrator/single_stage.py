"""Requests of a fleet without a pipeline: one stage answers them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import OmniError, RequestRefusedError
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.dispatch.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.requests.request_owner import OrchestratorRequestState, RequestOwner, refuse
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RunEnded, StageRun, StreamingInputState

if TYPE_CHECKING:
    # Imports vLLM; the modules of this package must not.
    from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

_STAGE = 0


class SingleStageRequests(RequestOwner[OrchestratorRequestState]):
    """Gives each request to the dispatcher of the only stage."""

    def __init__(
        self, api: "EngineApi", dispatcher: Dispatcher, gate: AdmissionGate | None, put: Callable[[Any], None]
    ) -> None:
        super().__init__(put, None if gate is None else gate.request_ended)
        self._api = api
        self._gate = gate
        self._dispatcher = dispatcher

    def submit(self, message: SubmitRequest) -> None:
        """Begin a request, or add a chunk to its session; an earlier one with the same id is aborted."""
        request = message.request
        state = self.states.get(request.request_id)
        if state is not None:
            run = state.runs[_STAGE]
            if run.streaming is not None:
                self.runs_ended(_STAGE, self._dispatcher.add_chunk(run, request))
                return
            # Outputs of two requests with one id could not be told apart. The client waits for the newer request.
            self.abort((request.request_id,), whole=True)
        streaming = StreamingInputState() if request.resumable else None
        movable = self._api.make_movable(request)
        try:
            ticket = None if self._gate is None else self._gate.issue_ticket(message)
        except RequestRefusedError as error:
            refuse(message, error, self._put)
            return
        run = StageRun(
            request.request_id,
            movable,
            message.submitted_at,
            streaming=streaming,
            chosen_replicas=message.chosen_replicas,
            ticket=ticket,
        )
        self.states[request.request_id] = OrchestratorRequestState(request, ticket, runs={_STAGE: run})
        if ended := self._dispatcher.submit(run):
            self.runs_ended(_STAGE, ended)

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        request_id = message.request.request_id
        self._put(RequestFailed(request_id, error))
        self.abort((request_id,), whole=True)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        states = [self._drop(request_id) for request_id in request_ids]
        self._dispatcher.finisher.abort(state.runs[_STAGE] for state in states if state is not None)

    def accept_outputs(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        outputs = []
        for run, output in accepted:
            outputs.append(output)
            if run.ended:
                self._drop(run.request_id)
        return outputs

    def runs_ended(self, stage_id: int, ended: Sequence[RunEnded]) -> None:
        for run, outputs, error in ended:
            self._drop(run.request_id)
            if error is not None:
                self._put(RequestFailed(run.request_id, error))
            elif outputs is not None:
                self._put(outputs)
