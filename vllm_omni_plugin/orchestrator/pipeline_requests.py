"""Requests of a pipeline: each runs through the stages it needs, whose outputs become the inputs of the next."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from vllm_omni_plugin.errors import OmniError, StageError, StageInputError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.messages import RequestFailed, RequestStages, SubmitRequest
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.pause_order import PauseOrder
from vllm_omni_plugin.orchestrator.pipeline_call import CallEnded, StageEvent
from vllm_omni_plugin.orchestrator.preparation import Preparation, WholeInput
from vllm_omni_plugin.orchestrator.request_plan import make_plan
from vllm_omni_plugin.orchestrator.request_state import PipelineRequestState
from vllm_omni_plugin.orchestrator.requests import RequestTable
from vllm_omni_plugin.orchestrator.run_events import Accepted, RunDispatched, RunEvent, RunFailed
from vllm_omni_plugin.orchestrator.stage_api import NOTHING
from vllm_omni_plugin.orchestrator.stage_inputs import StageInputs
from vllm_omni_plugin.orchestrator.stage_run import StageRun, StreamingInputState
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Stage
from vllm_omni_plugin.pipeline.transfer import StageOutput

logger = init_logger(__name__)

_NOTHING_READ = StageOutput()
_END = StageOutput(finish_reason="stop")


class PipelineRequests:
    """Satisfies `Requests` and `InputTaker`. Lives on the orchestrator's loop; nothing in it blocks.

    Args:
        preparation: makes inputs; knows the pipeline.
        dispatchers: of the stages, by stage id.
        put: gives an item to AsyncLLM's side.
        metrics: what it counts.
        clock: monotonic seconds.

    Attributes:
        states: unfinished requests by the client's id.
        pause_order: how the stages come to rest.
    """

    def __init__(
        self,
        preparation: Preparation,
        dispatchers: Sequence[Dispatcher],
        put: Callable[[Any], None],
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
    ) -> None:
        pipeline = self._pipeline = preparation.pipeline
        self.states: RequestTable[PipelineRequestState] = RequestTable()
        self.pause_order = PauseOrder(pipeline, self.states.values)
        self._apis = preparation.apis
        self._dispatchers = dispatchers
        self._inputs = StageInputs(preparation, self, clock)
        self._put = put
        self._metrics = metrics
        self._clock = clock
        self._default_plan = make_plan(pipeline, None)
        # Looked at with every output, so found out once.
        self._decodes = frozenset(
            stage.id for stage in pipeline.stages if pipeline.transform_of(stage) == BuiltInTransform.KV_TRANSFER
        )

    def submit(self, message: SubmitRequest) -> None:
        """See `Requests`."""
        request = message.request
        if request.abort_immediately:
            # It frees what another fleet's prefill has left for this one; here a prefill is a stage, and nobody waits.
            return
        self.abort((request.request_id,), whole=True)
        if request.resumable:
            error = StageInputError("A pipeline takes whole prompts: streaming input is for a fleet of one stage.")
            _refuse(message, error, self._put)
            return
        try:
            state = self._new_state(message)
        except (ValueError, StageInputError) as error:
            _refuse(message, StageInputError(str(error)), self._put)
            return
        self.states[state.request_id] = state
        for stage in state.plan.roots:
            self._begin(state, stage)

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        """See `Requests`."""
        state = self.states.get(message.request.request_id)
        if state is None:
            _refuse(message, error, self._put)
        else:
            self._fail(state, error)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """See `Requests`."""
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is not None and (state.call is None or whole or not self._ends_front_alone(state)):
                self._drop(state, StageError("The request was aborted."))

    def take(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        """See `Requests`."""
        answers = [self._take_one(stage_id, run, output) for run, output in accepted]
        return [answer for answer in answers if answer is not None]

    def handle(self, stage_id: int, events: Sequence[RunEvent]) -> None:
        """See `Requests`."""
        stage = self._pipeline.stages[stage_id]
        for event in events:
            run = event.run
            state = self._state_of(stage_id, run)
            if state is None:
                continue
            if isinstance(event, RunDispatched):
                self.spend(state, stage, "queue", run.dispatched_at - run.submitted_at)
            elif isinstance(event, RunFailed):
                self._stage_failed(state, stage, type(event.error)(f"Stage {stage.name!r}: {event.error}"))
            elif event.outputs is not None:
                event.outputs.outputs = self.take(stage_id, [(run, output) for output in event.outputs.outputs])
                if event.outputs.outputs:
                    self._put(event.outputs)
            else:
                # A session whose input was closed after its last turn.
                if stage_id == state.final_stage_id:
                    self._put(self._apis[stage_id].end(state.request_id))
                self._pass_on(state, stage, _END, ended=True)

    def close(self) -> None:
        """See `Requests`."""
        states = list(self.states.values())
        self.states.clear()
        for state in states:
            self._tell(state, StageError("The server has shut down."))
        self._inputs.close()

    def wants(self, state: PipelineRequestState) -> bool:
        """See `InputTaker`."""
        return self.states.get(state.request_id) is state

    def start_run(
        self, state: PipelineRequestState, stage: Stage, given: WholeInput, session: StreamingInputState | None
    ) -> None:
        """See `InputTaker`."""
        api = self._apis[stage.id]
        run = state.runs[stage.id] = StageRun(
            api.movable(given.request),
            self._clock(),
            streaming=session,
            dispatches=state.dispatches,
            first_request=given.first_request,
        )
        if stage.id in state.plan.read:
            state.readers[stage.id] = api.reader(run.request)
        self.handle(stage.id, self._dispatchers[stage.id].submit(run))
        self.pause_order.note_progress()

    def add_chunk(self, stage: Stage, run: StageRun, chunk: Any) -> None:
        """See `InputTaker`."""
        self.handle(stage.id, self._dispatchers[stage.id].add_chunk(run, chunk))

    def input_failed(self, state: PipelineRequestState, stage: Stage, error: OmniError) -> None:
        """See `InputTaker`."""
        if self.wants(state):
            self._stage_failed(state, stage, error)

    def _fail(self, state: PipelineRequestState, error: OmniError) -> None:
        """End a request with an error. Nothing to do if it has ended."""
        if self.wants(state):
            self._put(RequestFailed(state.request_id, error))
            self._drop(state, error)

    def spend(self, state: PipelineRequestState, stage: Stage, part: str, seconds: float) -> None:
        """Note what a request has spent on a part of a stage."""
        timings = state.pipeline_timings.setdefault(stage.name, {})
        timings[part] = timings.get(part, 0.0) + seconds
        self._metrics.spent(stage.id, stage.name, part, seconds)

    def _new_state(self, message: SubmitRequest) -> PipelineRequestState:
        request, call = message.request, message.call
        plan = self._default_plan if call is None else make_plan(self._pipeline, call)
        if plan.front is not None:
            self._apis[plan.front].check_front(request)
        return PipelineRequestState(
            request,
            message.submitted_at,
            final_stage_id=plan.front,
            final_output_stage_ids=plan.finals,
            sampling_params_list=tuple(
                NOTHING if call is None else call.sampling.get(stage.name, NOTHING) for stage in self._pipeline.stages
            ),
            mm_features=request.mm_features,
            call=call,
            plan=plan,
            dispatches=message.dispatches,
            traced=message.traced,
        )

    def _state_of(self, stage_id: int, run: StageRun) -> PipelineRequestState | None:
        """The unfinished request that a run is part of."""
        state = self.states.get(run.request_id)
        return state if state is not None and state.runs.get(stage_id) is run else None

    def _begin(self, state: PipelineRequestState, stage: Stage) -> None:
        """All that a stage needs is there."""
        if stage.output is Modality.KV_CACHE and self._may_skip(state, stage):
            self._end(state, stage)
        else:
            self._inputs.begin(state, stage)

    def _may_skip(self, state: PipelineRequestState, prefill: Stage) -> bool:
        tokens = len(state.request.prompt_token_ids or ())
        return tokens < prefill.min_prompt_tokens or not self._dispatchers[prefill.id].can_dispatch

    def _take_one(self, stage_id: int, run: StageRun, output: Any) -> Any | None:
        """What of an output goes to vLLM's server; the rest goes to the next stages, and to who watches this one."""
        state, stage = self._state_of(stage_id, run), self._pipeline.stages[stage_id]
        if state is None:
            return None
        try:
            return self._take(state, stage, run, output)
        except Exception as error:  # of one request, which must not stop the others
            logger.exception("Stage %r cannot go on with request %s.", stage.name, state.request_id)
            self._fail(state, StageError(f"Stage {stage.name!r}: its output could not be read: {error}"))
            return None

    def _take(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any) -> Any | None:
        api = self._apis[stage.id]
        if stage.id not in state.answered:
            state.answered.add(stage.id)
            self.spend(state, stage, "first_output", self._clock() - run.dispatched_at)
        if output.finish_reason is not None and api.cut_short(output):
            return self._cut_short(state, stage, output)
        if stage.output is Modality.KV_CACHE:
            if run.finished:
                state.cache_params, state.cached_tokens = output.kv_transfer_params, api.cached_tokens(output) or 0
                self._end(state, stage)
            return None
        read, answer = self._read(state, stage, run, output), None
        if stage.id == state.plan.front:
            answer = self._answer(state, stage, run, output, read)
        self._pass_on(state, stage, read, run.finished)
        return answer

    def _read(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any) -> StageOutput:
        """What an output says, if anybody here wants to know."""
        reader = state.readers.get(stage.id)
        if reader is None:
            return _NOTHING_READ
        read = reader.read(output, run.finished)
        if read.finish_reason is not None and not run.finished:
            # At a stop string, of which the engine knows nothing.
            self._dispatchers[stage.id].abort((run,))
        return read

    def _answer(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any, read: StageOutput) -> Any:
        """What of a front stage's output goes to vLLM's server."""
        api, cached_tokens = self._apis[stage.id], state.cached_tokens
        if cached_tokens is not None and run.attempts == 1 and stage.id in self._decodes:
            # Any later attempt computes the prompt itself, and its own word is right.
            api.restate_cached(output, cached_tokens)
        if not run.finished:
            # The end of a turn of ours; the server knows of one answer only.
            output.finish_reason = None
        return api.answer(output, read)

    def _pass_on(self, state: PipelineRequestState, stage: Stage, read: StageOutput, ended: bool) -> None:
        """A stage has put something out: show it, and give it to those that work on chunks."""
        plan = state.plan
        if state.call is not None and stage.id in plan.shown:
            state.call.put(StageEvent(stage.name, read))
        for downstream in plan.downstream[stage.id]:
            if downstream.async_chunk:
                self._inputs.add_output(state, downstream, read, ended)
        if ended:
            self._end(state, stage)

    def _end(self, state: PipelineRequestState, stage: Stage) -> None:
        """A stage has ended: those that waited for it begin, or the request is complete."""
        state.ended[stage.id] = now = self._clock()
        self.pause_order.note_progress()
        run = state.runs.get(stage.id)
        if run is not None and run.attempts:
            self.spend(state, stage, "run", now - run.dispatched_at)
        if stage.id in state.final_output_stage_ids:
            state.finished_final_output_stage_ids.add(stage.id)
        if state.finished:
            self._complete(state)
            return
        for downstream in state.plan.downstream[stage.id]:
            inputs = {upstream.id for upstream in self._pipeline.upstream(downstream)}
            if downstream.id not in state.begun and inputs <= state.ended.keys():
                self._begin(state, downstream)

    def _complete(self, state: PipelineRequestState) -> None:
        self.states.pop(state.request_id)
        self._abort_runs(state)
        if state.final_stage_id is None:
            self._put(self._apis[self._pipeline.prompt_stage.id].end(state.request_id))
        self._tell(state, None)

    def _stage_failed(self, state: PipelineRequestState, stage: Stage, error: OmniError) -> None:
        if stage.output is Modality.KV_CACHE:
            # The next stage computes what nobody has computed for it.
            self._end(state, stage)
        else:
            self._fail(state, error)

    def _cut_short(self, state: PipelineRequestState, stage: Stage, output: Any) -> Any | None:
        """An engine has given a request up."""
        if stage.output is Modality.KV_CACHE:
            self._end(state, stage)
            return None
        reader = state.readers.get(stage.id)
        read = _NOTHING_READ if reader is None else reader.read(output, True)
        if "error" in read.metadata:
            # A Python stage has said what is wrong, and whose fault it is.
            kind = StageInputError if read.metadata.get("status") == HTTPStatus.BAD_REQUEST else StageError
            self._fail(state, kind(read.metadata["error"]))
            return None
        aborted = self._apis[stage.id].aborted(output)
        what = "was paused or put to sleep, which aborted the request" if aborted else "gave the request up"
        error = StageError(f"Stage {stage.name!r}: its engine {what}.")
        if stage.id != state.final_stage_id and not (aborted and state.call is None):
            self._fail(state, error)
            return None
        # vLLM's server words it as it does without a pipeline.
        self._drop(state, error)
        return output

    def _drop(self, state: PipelineRequestState, error: Exception) -> None:
        """Give a request up with all that stages do for it."""
        self.states.pop(state.request_id)
        self.pause_order.note_progress()
        self._abort_runs(state)
        self._tell(state, error)

    def _tell(self, state: PipelineRequestState, error: Exception | None) -> None:
        """Tell whoever wants to know that nothing more comes for a request."""
        if state.traced:
            times = state.stage_times(self._pipeline.stages, self._clock())
            self._put(RequestStages(state.request_id, times))
        if state.call is not None:
            state.call.put(CallEnded(error, state.pipeline_timings))

    def _abort_runs(self, state: PipelineRequestState) -> None:
        for stage_id, run in state.runs.items():
            self._dispatchers[stage_id].abort((run,))

    def _ends_front_alone(self, state: PipelineRequestState) -> bool:
        """vLLM's server needs no more of the front stage. Returns whether that is all that it means."""
        front = state.final_stage_id
        if front is None or front in state.ended:
            return front is not None
        stage = self._pipeline.stages[front]
        if front not in state.runs or (stage.is_vllm and front in state.readers):
            # A stop string would have been seen here, too: its client has left.
            return False
        self._dispatchers[front].abort((state.runs[front],))
        self._pass_on(state, stage, _END, ended=True)
        return True


def _refuse(message: SubmitRequest, error: OmniError, put: Callable[[Any], None]) -> None:
    """A request cannot be begun."""
    put(RequestFailed(message.request.request_id, error))
    if message.call is not None:
        message.call.put(CallEnded(error))
