"""Requests of a fleet without a pipeline: one stage answers them."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.orchestrator.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.messages import RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.request_api import RequestApi
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.stage_run import StageRun, StreamingInputState
from vllm_omni_plugin.orchestrator.unfinished import UnfinishedRequests

_STAGE = 0


class SingleStage:
    """Satisfies `Requests`.

    Args:
        api: see `RequestApi`.
        put: gives an item to AsyncLLM's side.

    Attributes:
        dispatcher: of the stage; set before the first request.
        states: unfinished requests by the client's id.
    """

    dispatcher: Dispatcher

    def __init__(self, api: RequestApi, put: Callable[[Any], None]) -> None:
        self.states: UnfinishedRequests[OrchestratorRequestState] = UnfinishedRequests()
        self._api = api
        self._put = put

    def submit(self, message: SubmitRequest) -> None:
        """See `Requests`."""
        request = message.request
        run = self.dispatcher.runs.get(request.request_id)
        if run is not None and run.streaming is not None:
            self.dispatcher.add_chunk(run, request)
            return
        if run is not None:
            # Two attempts under one client id could not be told apart; the newer one is the one that is waited for.
            self.abort((request.request_id,), whole=True)
        streaming = StreamingInputState() if request.resumable else None
        run = StageRun(
            self._api.movable(request), message.submitted_at, streaming=streaming, dispatches=message.dispatches
        )
        self.states[request.request_id] = OrchestratorRequestState(
            request, message.submitted_at, mm_features=request.mm_features, runs={_STAGE: run}
        )
        self.dispatcher.submit(run)

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        """See `Requests`."""
        request_id = message.request.request_id
        self._put(RequestFailed(request_id, error))
        self.abort((request_id,), whole=True)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """See `Requests`."""
        for request_id in request_ids:
            self.states.pop(request_id, None)
        self.dispatcher.abort(request_ids)

    def take(self, stage_id: int, run: StageRun, output: Any) -> Any:
        """See `Requests`."""
        if output.finish_reason is not None and run.finished:
            self.states.pop(run.request_id, None)
        return output

    def run_dispatched(self, stage_id: int, run: StageRun) -> None:
        """See `RunListener`."""

    def run_failed(self, stage_id: int, run: StageRun, error: OmniError) -> None:
        """See `RunListener`."""
        self.states.pop(run.request_id, None)
        self._put(RequestFailed(run.request_id, error))

    def run_ended(self, stage_id: int, run: StageRun, outputs: Any | None) -> None:
        """See `RunListener`."""
        self.states.pop(run.request_id, None)
        if outputs is not None:
            self._put(outputs)

    def close(self) -> None:
        """See `Requests`."""
        self.states.clear()
