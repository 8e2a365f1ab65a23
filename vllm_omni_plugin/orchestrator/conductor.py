"""Requests of a pipeline: each runs through the stages it needs, whose outputs become the inputs of the next."""

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm_omni_plugin.errors import OmniError, StageError, StageInputError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.feed import Feed, Piece
from vllm_omni_plugin.orchestrator.journey import Journey, Plan, make_plan
from vllm_omni_plugin.orchestrator.messages import RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.pipeline_call import CallEnded, PipelineCall, StageEvent
from vllm_omni_plugin.orchestrator.preparation import Preparation
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.stage_api import StageApi
from vllm_omni_plugin.orchestrator.stage_run import StageRun, StreamingInputState
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Pipeline, Stage
from vllm_omni_plugin.pipeline.transfer import StageOutput

logger = init_logger(__name__)

_NOTHING = StageOutput()


class Conductor:
    """Satisfies `Requests`. Lives on the orchestrator's loop; what may take long is done by `preparation`.

    Args:
        pipeline: the stages.
        apis: of the stages, by stage id.
        preparation: makes inputs.
        put: gives an item to AsyncLLM's side.
        metrics: what it counts.
        clock: monotonic seconds.

    Attributes:
        dispatchers: of the stages, by stage id; set before the first request.
        states: unfinished requests by the client's id.
    """

    dispatchers: Sequence[Dispatcher]

    def __init__(
        self,
        pipeline: Pipeline,
        apis: Sequence[StageApi],
        preparation: Preparation,
        put: Callable[[Any], None],
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.states: dict[str, OrchestratorRequestState] = {}
        self._pipeline = pipeline
        self._apis = apis
        self._preparation = preparation
        self._put = put
        self._metrics = metrics
        self._clock = clock
        self._default_plan = make_plan(pipeline, None)

    def submit(self, message: SubmitRequest) -> None:
        """See `Requests`."""
        request = message.request
        if request.request_id in self.states:
            self.abort((request.request_id,), whole=True)
        if request.resumable:
            error = StageInputError("A pipeline takes whole prompts: streaming input is for a fleet of one stage.")
            self._put(RequestFailed(request.request_id, error))
            return
        state = self._new_state(message)
        self.states[state.request_id] = state
        assert state.journey is not None
        for stage in state.journey.plan.roots:
            self._begin(state, state.journey, stage)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """See `Requests`."""
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is None:
                continue
            journey, front = state.journey, state.final_stage_id
            assert journey is not None
            if state.call is None or whole or front is None or not self._ends_front_alone(state, journey, front):
                self._drop(state)

    def take(self, stage_id: int, run: StageRun, output: Any) -> Any | None:
        """See `Requests`."""
        state = self.states.get(run.request_id)
        if state is None or state.runs.get(stage_id) is not run:
            return None
        journey, stage, api = state.journey, self._pipeline.stages[stage_id], self._apis[stage_id]
        assert journey is not None
        if len(run.produced) == len(output.new_token_ids):
            self._spend(state, stage, "first_output", self._clock() - run.dispatched_at)
        if output.finish_reason is not None and api.cut_short(output):
            return self._cut_short(state, journey, stage, output)
        if stage.output is Modality.KV_CACHE:
            journey.cache_params, journey.cached_tokens = output.kv_transfer_params, api.cached_tokens(output) or 0
            self._end(state, journey, stage)
            return None
        read, ended = self._read(state, journey, run, output)
        answer = None
        if stage_id == journey.plan.front:
            if journey.cached_tokens is not None and run.first_request is not None and run.attempts == 1:
                api.restate_cached(output, journey.cached_tokens)
            answer = api.answer(output, read)
        self._pass_on(state, journey, stage, read, ended)
        return answer

    def run_dispatched(self, stage_id: int, run: StageRun) -> None:
        """See `RunListener`."""
        state = self.states.get(run.request_id)
        if state is not None:
            self._spend(state, self._pipeline.stages[stage_id], "queue", run.dispatched_at - run.submitted_at)

    def run_failed(self, stage_id: int, run: StageRun, error: OmniError) -> None:
        """See `RunListener`."""
        state, stage = self.states.get(run.request_id), self._pipeline.stages[stage_id]
        if state is None or state.journey is None:
            return
        if stage.output is Modality.KV_CACHE:
            # The next stage computes what nobody has computed for it.
            self._end(state, state.journey, stage)
        else:
            self._fail(state, error)

    def run_ended(self, stage_id: int, run: StageRun, outputs: Any | None) -> None:
        """See `RunListener`."""
        state = self.states.get(run.request_id)
        if state is None or state.journey is None:
            return
        if outputs is None:
            rest = StageOutput(finish_reason="stop")
            self._pass_on(state, state.journey, self._pipeline.stages[stage_id], rest, ended=True)
            return
        answers = [self.take(stage_id, run, output) for output in outputs.outputs]
        outputs.outputs = [answer for answer in answers if answer is not None]
        if outputs.outputs:
            self._put(outputs)

    def close(self) -> None:
        """See `Requests`."""
        self.states.clear()
        self._preparation.close()

    def _new_state(self, message: SubmitRequest) -> OrchestratorRequestState:
        request, call = message.request, message.call
        plan = self._plan(call)
        return OrchestratorRequestState(
            request,
            message.submitted_at,
            final_stage_id=plan.front,
            final_output_stage_ids=plan.finals,
            sampling_params_list=tuple(
                call.sampling.get(stage.name, {}) if call is not None else {} for stage in self._pipeline.stages
            ),
            mm_features=request.mm_features,
            call=call,
            journey=Journey(plan, message.receipt),
        )

    def _plan(self, call: PipelineCall | None) -> Plan:
        return self._default_plan if call is None else make_plan(self._pipeline, call)

    def _begin(self, state: OrchestratorRequestState, journey: Journey, stage: Stage) -> None:
        """All inputs of a stage are there."""
        journey.begun.add(stage.id)
        state.stage_submit_ts[stage.id] = self._clock()
        if stage.output is Modality.KV_CACHE and self._may_skip(state, stage):
            self._end(state, journey, stage)
            return
        self._preparation.prepare(
            stage,
            self._preparation.work(state, journey, stage),
            partial(self._prepared, state, journey, stage, self._clock(), partial(self._run, state, journey, stage)),
        )

    def _may_skip(self, state: OrchestratorRequestState, prefill: Stage) -> bool:
        tokens = len(state.request.prompt_token_ids or ())
        return tokens < prefill.min_prompt_tokens or not self.dispatchers[prefill.id].can_dispatch

    def _prepared(
        self,
        state: OrchestratorRequestState,
        journey: Journey,
        stage: Stage,
        began: float,
        then: Callable[[Any], None],
        outcome: Callable[[], Any],
    ) -> None:
        """The preparation is done, for a request that may have been given up meanwhile."""
        if self.states.get(state.request_id) is not state:
            return
        self._spend(state, stage, "transfer", self._clock() - began)
        try:
            made = outcome()
        except OmniError as error:
            self._fail(state, error)
        except Exception as error:
            logger.exception("Stage %r cannot go on with request %s.", stage.name, state.request_id)
            self._fail(state, StageError(f"Stage {stage.name!r}: its input could not be made: {error}"))
        else:
            then(made)

    def _run(self, state: OrchestratorRequestState, journey: Journey, stage: Stage, request: Any) -> None:
        """The input of a stage has been prepared."""
        if self._pipeline.transform_of(stage) == BuiltInTransform.KV_TRANSFER:
            # What a prefill left can be fetched once, so only the first attempt is told of it.
            self._submit(state, journey, stage, state.request, first_request=request)
        else:
            self._submit(state, journey, stage, request)

    def _submit(
        self,
        state: OrchestratorRequestState,
        journey: Journey,
        stage: Stage,
        request: Any,
        first_request: Any = None,
        session: StreamingInputState | None = None,
    ) -> None:
        api = self._apis[stage.id]
        run = state.runs[stage.id] = StageRun(
            api.movable(request),
            self._clock(),
            streaming=session,
            receipt=journey.receipt,
            first_request=first_request,
        )
        if stage.id in journey.plan.read:
            journey.readers[stage.id] = api.reader(run.request)
        self.dispatchers[stage.id].submit(run)

    def _read(
        self, state: OrchestratorRequestState, journey: Journey, run: StageRun, output: Any
    ) -> tuple[StageOutput, bool]:
        """What an output says, if anybody here wants to know, and whether the stage has ended with it."""
        stage_id = next(stage_id for stage_id, other in state.runs.items() if other is run)
        reader = journey.readers.get(stage_id)
        if reader is None:
            return _NOTHING, run.finished
        read = reader.read(output, run.finished)
        if read.finish_reason is not None and not run.finished:
            # At a stop string, of which the engine knows nothing.
            self.dispatchers[stage_id].abort((run.request_id,))
        return read, run.finished

    def _pass_on(
        self, state: OrchestratorRequestState, journey: Journey, stage: Stage, read: StageOutput, ended: bool
    ) -> None:
        """A stage has put something out: show it, and feed it to those that work on chunks."""
        if state.call is not None and stage.id in journey.plan.shown:
            state.call.put(StageEvent(stage.name, read))
        for downstream in journey.plan.downstream[stage.id]:
            if downstream.async_chunk:
                if downstream.id not in journey.feeds:
                    journey.feeds[downstream.id] = Feed(downstream.chunk_size)
                    journey.begun.add(downstream.id)
                    state.stage_submit_ts[downstream.id] = self._clock()
                journey.feeds[downstream.id].add(read, last=ended)
                self._pump(state, journey, downstream)
        if ended:
            self._end(state, journey, stage)

    def _pump(self, state: OrchestratorRequestState, journey: Journey, stage: Stage) -> None:
        """Let the transform have the next chunk of a stage's input, if there is one and it has time."""
        feed = journey.feeds[stage.id]
        piece = feed.take()
        if piece is not None:
            then = partial(self._fed, state, journey, stage, feed, piece)
            self._preparation.prepare(
                stage,
                self._preparation.chunk_work(state, journey, stage, feed, piece),
                partial(self._prepared, state, journey, stage, self._clock(), then),
            )

    def _fed(
        self,
        state: OrchestratorRequestState,
        journey: Journey,
        stage: Stage,
        feed: Feed,
        piece: Piece,
        made: tuple[Any | None, Any | None],
    ) -> None:
        """A chunk of a stage's input has been prepared: it, and what closes the input behind the last one."""
        feed.busy = False
        for request in made:
            if request is not None:
                self._feed(state, journey, stage, feed, request)
        if piece.last and not feed.begun:
            self._fail(state, StageError(f"Stage {stage.name!r}: its transform returned nothing for the whole input."))
        elif self.states.get(state.request_id) is state:
            self._pump(state, journey, stage)

    def _feed(self, state: OrchestratorRequestState, journey: Journey, stage: Stage, feed: Feed, request: Any) -> None:
        run = state.runs.get(stage.id)
        if run is not None and not run.finished:
            self.dispatchers[stage.id].add_chunk(run, request)
        elif not feed.begun and request.resumable:
            feed.begun = True
            self._submit(state, journey, stage, request, session=StreamingInputState(replayable=True))

    def _end(self, state: OrchestratorRequestState, journey: Journey, stage: Stage) -> None:
        """A stage has ended: those that waited for it begin, or the request is complete."""
        if stage.id in journey.ended:
            return
        journey.ended.add(stage.id)
        run = state.runs.get(stage.id)
        if run is not None:
            self._spend(state, stage, "run", self._clock() - run.dispatched_at)
        if stage.id in state.final_output_stage_ids:
            state.finished_final_output_stage_ids.add(stage.id)
        for downstream in journey.plan.downstream[stage.id]:
            inputs = {upstream.id for upstream in self._pipeline.upstream(downstream)}
            if downstream.id not in journey.begun and inputs <= journey.ended:
                self._begin(state, journey, downstream)
        if state.finished and self.states.get(state.request_id) is state:
            self._complete(state)

    def _complete(self, state: OrchestratorRequestState) -> None:
        del self.states[state.request_id]
        self._abort_runs(state)
        if state.final_stage_id is None:
            self._put(self._apis[self._pipeline.entry.id].end(state.request_id))
        if state.call is not None:
            state.call.put(CallEnded(None, state.pipeline_timings))

    def _cut_short(self, state: OrchestratorRequestState, journey: Journey, stage: Stage, output: Any) -> Any | None:
        """An engine has given a request up."""
        if stage.output is Modality.KV_CACHE:
            self._end(state, journey, stage)
            return None
        reader = journey.readers.get(stage.id)
        read = _NOTHING if reader is None else reader.read(output, True)
        if "error" in read.metadata:
            # A Python stage has said what is wrong, and whose fault it is.
            kind = StageInputError if read.metadata.get("status") == HTTPStatus.BAD_REQUEST else StageError
            self._fail(state, kind(read.metadata["error"]))
            return None
        error = StageError(f"Stage {stage.name!r}: its engine gave the request up.")
        if stage.id != journey.plan.front:
            self._fail(state, error)
            return None
        # vLLM's server words it as it does without a pipeline.
        self._drop(state, error)
        return output

    def _fail(self, state: OrchestratorRequestState, error: OmniError) -> None:
        self._put(RequestFailed(state.request_id, error))
        self._drop(state, error)

    def _drop(self, state: OrchestratorRequestState, error: Exception | None = None) -> None:
        """Give a request up with all that stages do for it."""
        self.states.pop(state.request_id, None)
        self._abort_runs(state)
        if state.call is not None:
            state.call.put(CallEnded(error or StageError("The request was aborted."), state.pipeline_timings))

    def _abort_runs(self, state: OrchestratorRequestState) -> None:
        for stage_id, run in state.runs.items():
            if not run.finished:
                self.dispatchers[stage_id].abort((state.request_id,))

    def _ends_front_alone(self, state: OrchestratorRequestState, journey: Journey, front: int) -> bool:
        """vLLM's server needs no more of the front stage. Returns whether that is all that it means."""
        if front in journey.ended:
            return True
        if front not in state.runs or front in journey.readers:
            # A stop string would have been seen here, too: its client has left.
            return False
        self.dispatchers[front].abort((state.request_id,))
        self._end(state, journey, self._pipeline.stages[front])
        return True

    def _spend(self, state: OrchestratorRequestState, stage: Stage, part: str, seconds: float) -> None:
        timings = state.pipeline_timings.setdefault(stage.name, {})
        timings[part] = timings.get(part, 0.0) + seconds
        self._metrics.spent(stage.name, part, seconds)
