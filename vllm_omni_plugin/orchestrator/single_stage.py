"""Requests of a fleet without a pipeline: one stage answers them."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.orchestrator.dispatch.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.pipeline.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.requests.request_api import RequestApi
from vllm_omni_plugin.orchestrator.requests.request_owner import Requests
from vllm_omni_plugin.orchestrator.requests.run_events import Accepted, RunDispatched, RunEvent, RunFailed
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun, StreamingInputState

_STAGE = 0


class SingleStage(Requests[OrchestratorRequestState]):
    """Gives each request to the dispatcher of its stage.

    Args:
        api: see `RequestApi`.
        dispatcher: of the stage.
        put: gives an item to AsyncLLM's side.
    """

    def __init__(self, api: RequestApi, dispatcher: Dispatcher, put: Callable[[Any], None]) -> None:
        super().__init__(put)
        self._api = api
        self._dispatcher = dispatcher

    def submit(self, message: SubmitRequest) -> None:
        request = message.request
        state = self.states.get(request.request_id)
        if state is not None:
            run = state.runs[_STAGE]
            if run.streaming is not None:
                self.handle(_STAGE, self._dispatcher.add_chunk(run, request))
                return
            # Two attempts under one client id could not be told apart; the newer one is the one that is waited for.
            self.abort((request.request_id,), whole=True)
        streaming = StreamingInputState() if request.resumable else None
        run = StageRun(
            request.request_id,
            self._api.movable(request),
            message.submitted_at,
            streaming=streaming,
            dispatches=message.dispatches,
        )
        self.states[request.request_id] = OrchestratorRequestState(
            request, message.submitted_at, mm_features=request.mm_features, runs={_STAGE: run}
        )
        self.handle(_STAGE, self._dispatcher.submit(run))

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        request_id = message.request.request_id
        self._put(RequestFailed(request_id, error))
        self.abort((request_id,), whole=True)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        states = [self.states.pop(request_id, None) for request_id in request_ids]
        self._dispatcher.abort(state.runs[_STAGE] for state in states if state is not None)

    def take(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        outputs = []
        for run, output in accepted:
            outputs.append(output)
            if run.closed:
                self.states.pop(run.request_id, None)
        return outputs

    def handle(self, stage_id: int, events: Sequence[RunEvent]) -> None:
        for event in events:
            if isinstance(event, RunDispatched):
                continue
            self.states.pop(event.run.request_id, None)
            if isinstance(event, RunFailed):
                self._put(RequestFailed(event.run.request_id, event.error))
            elif event.outputs is not None:
                self._put(event.outputs)
