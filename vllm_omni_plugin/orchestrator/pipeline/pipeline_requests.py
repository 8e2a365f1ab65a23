"""Requests of a pipeline: each runs through the stages it needs, and their outputs become the inputs of the next."""

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm_omni_plugin.errors import NoReplicaError, OmniError, RequestRefusedError, StageError, StageInputError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.dispatch.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.pipeline.chunked_input import ChunkedInput, OutputChunk
from vllm_omni_plugin.orchestrator.pipeline.input_builder import ChunkRequests, RunRequests, StageInputBuilder
from vllm_omni_plugin.orchestrator.pipeline.pause_sequence import PauseSequence
from vllm_omni_plugin.orchestrator.pipeline.request_state import PipelineRequestState, plan_request
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    PipelineCallEnded,
    RequestFailed,
    RequestStages,
    StageEvent,
    SubmitRequest,
)
from vllm_omni_plugin.orchestrator.requests.request_owner import RequestOwner, refuse
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RunEnded, StageRun, StreamingInputState
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Stage
from vllm_omni_plugin.pipeline.transfer import StageOutput

logger = init_logger(__name__)

_NOTHING_READ = StageOutput()
_END = StageOutput(finish_reason="stop")


class PipelineRequests(RequestOwner[PipelineRequestState]):
    """Takes each request from stage to stage.

    Args:
        input_builder: makes the inputs of stages on threads; knows the pipeline.
        dispatchers: of the stages, by stage id.
        gate: where requests come in.
        put: gives an item to AsyncLLM's side.
        metrics: counts the time spent in stages.
        clock: monotonic seconds.

    Attributes:
        pause_sequence: the order in which the stages are paused.
    """

    def __init__(
        self,
        input_builder: StageInputBuilder,
        dispatchers: Sequence[Dispatcher],
        gate: AdmissionGate,
        put: Callable[[Any], None],
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(put, gate.request_ended)
        pipeline = self._pipeline = input_builder.pipeline
        self.pause_sequence = PauseSequence(pipeline, self.states.values)
        self._apis = input_builder.apis
        self._dispatchers = dispatchers
        self._gate = gate
        self._preparation = input_builder
        self._metrics = metrics
        self._clock = clock
        self._default_plan = plan_request(pipeline, None)
        self._decodes = frozenset(
            stage.id for stage in pipeline.stages if pipeline.transform_of(stage) == BuiltInTransform.KV_TRANSFER
        )

    def submit(self, message: SubmitRequest) -> None:
        if message.request.abort_immediately:
            # It frees the KV cache that a prefill outside of this fleet has left; here the prefill is a stage.
            return
        self.abort((message.request.request_id,), whole=True)
        try:
            state = self._new_state(message)
        except (ValueError, OmniError) as error:
            refuse(message, error if isinstance(error, OmniError) else StageInputError(str(error)), self._put)
            return
        self.states[state.request_id] = state
        for stage in state.plan.roots:
            self._begin(state, stage)

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        state = self.states.get(message.request.request_id)
        if state is None:
            refuse(message, error, self._put)
        else:
            self._fail(state, error)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is not None and (state.call is None or whole or not self._ends_front_alone(state)):
                self._close_request(state, StageError("The request was aborted."))

    def accept_outputs(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        answers = [self._take_one(stage_id, run, output) for run, output in accepted]
        return [answer for answer in answers if answer is not None]

    def runs_ended(self, stage_id: int, ended: Sequence[RunEnded]) -> None:
        stage = self._pipeline.stages[stage_id]
        for run, outputs, error in ended:
            state = self._state_of(stage_id, run)
            if state is None:
                continue
            if isinstance(error, RequestRefusedError):
                # Of the request as a whole, also if this stage could be left out.
                self._fail(state, error)
            elif error is not None:
                self._stage_failed(state, stage, type(error)(f"Stage {stage.name!r}: {error}"))
            elif outputs is not None:
                outputs.outputs = self.accept_outputs(stage_id, [(run, output) for output in outputs.outputs])
                if outputs.outputs:
                    self._put(outputs)
            else:
                # A session whose input was closed after its last turn.
                if stage_id == state.final_stage_id:
                    self._put(self._apis[stage_id].end(state.request_id))
                self._pass_on(state, stage, _END, ended=True)

    def close(self) -> None:
        states = list(self.states.values())
        super().close()
        for state in states:
            self._tell_end(state, StageError("The server has shut down."))
        self._preparation.close()

    def _fail(self, state: PipelineRequestState, error: OmniError) -> None:
        """End a request with an error. Nothing to do if it has ended."""
        if self._is_unfinished(state):
            self._put(RequestFailed(state.request_id, error))
            self._close_request(state, error)

    def _spend(self, state: PipelineRequestState, stage: Stage, part: str, seconds: float) -> None:
        """Note what a request has spent on a part of a stage."""
        timings = state.pipeline_timings.setdefault(stage.name, {})
        timings[part] = timings.get(part, 0.0) + seconds
        self._metrics.observe_stage(stage.id, stage.name, part, seconds)

    def _new_state(self, message: SubmitRequest) -> PipelineRequestState:
        if message.request.resumable:
            raise StageInputError("A pipeline takes whole prompts: streaming input is for a fleet of one stage.")
        plan = self._default_plan if message.call is None else plan_request(self._pipeline, message.call)
        if plan.front is not None:
            self._apis[plan.front].check_answerable(message.request)
        return PipelineRequestState.of(message, plan, self._gate.issue_ticket(message), self._pipeline.stages)

    def _is_unfinished(self, state: PipelineRequestState) -> bool:
        """Safe to call from any thread."""
        return self.states.get(state.request_id) is state

    def _state_of(self, stage_id: int, run: StageRun) -> PipelineRequestState | None:
        """The unfinished request that a run is part of."""
        state = self.states.get(run.request_id)
        return state if state is not None and state.runs.get(stage_id) is run else None

    def _begin(self, state: PipelineRequestState, stage: Stage) -> None:
        """All stages in front of this one have ended."""
        if stage.output is Modality.KV_CACHE:
            tokens = len(state.request.prompt_token_ids or ())
            if tokens < stage.min_prompt_tokens or not self._dispatchers[stage.id].can_dispatch:
                self._end(state, stage)
                return
        state.stage_submit_ts[stage.id] = self._clock()
        work = partial(self._preparation.whole, state, stage)
        self._prepare(state, stage, work, partial(self._start_run, state, stage, None))

    def _start_run(
        self, state: PipelineRequestState, stage: Stage, session: StreamingInputState | None, given: RunRequests
    ) -> None:
        """The input of a stage, or the first chunk of it, is ready."""
        api = self._apis[stage.id]
        run = state.runs[stage.id] = StageRun(
            state.request_id,
            api.make_movable(given.request),
            self._clock(),
            streaming=session,
            dispatches=state.dispatches,
            first_request=given.first_request,
            ticket=state.ticket_at(stage),
        )
        if stage.id in state.plan.read:
            state.readers[stage.id] = api.reader(run.request)
        self.runs_ended(stage.id, self._dispatchers[stage.id].submit(run))
        self.pause_sequence.note_progress()

    def _add_output(self, state: PipelineRequestState, stage: Stage, output: StageOutput, last: bool) -> None:
        """The stage in front of one that works on chunks has put something out; with `last`, it has ended."""
        chunks = state.chunked_inputs.get(stage.id)
        if chunks is None:
            chunks = state.chunked_inputs[stage.id] = ChunkedInput(stage.chunk_size)
            state.stage_submit_ts[stage.id] = self._clock()
        chunks.add(output, last)
        self._make_next_chunk(state, stage, chunks)

    def _make_next_chunk(self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput) -> None:
        piece = chunks.take()
        if piece is not None:
            work = partial(self._preparation.chunk, state, stage, chunks, piece)
            self._prepare(state, stage, work, partial(self._chunk_made, state, stage, chunks, piece))

    def _chunk_made(
        self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput, piece: OutputChunk, chunk: ChunkRequests
    ) -> None:
        chunks.busy = False
        if chunk.request is not None:
            self._send_chunk(state, stage, chunks, chunk.request)
        if piece.last and not chunks.begun:
            raise StageError(f"Stage {stage.name!r}: its transform returned nothing for the whole input.")
        if chunk.end is not None and self._is_unfinished(state):
            self._send_chunk(state, stage, chunks, chunk.end)
        if self._is_unfinished(state):
            self._make_next_chunk(state, stage, chunks)

    def _send_chunk(self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput, chunk: Any) -> None:
        if not chunks.begun:
            chunks.begun = True
            self._start_run(state, stage, StreamingInputState(replayable=True), RunRequests(chunk))
            return
        run = state.runs[stage.id]
        if not run.finished:
            self.runs_ended(stage.id, self._dispatchers[stage.id].add_chunk(run, chunk))

    def _prepare(
        self, state: PipelineRequestState, stage: Stage, work: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        """Do work for a stage on its threads, then pass the result to `then` on the loop."""
        done = partial(self._prepared, state, stage, self._clock(), then)
        self._preparation.prepare(stage, work, partial(self._is_unfinished, state), done)

    def _prepared(
        self,
        state: PipelineRequestState,
        stage: Stage,
        began: float,
        then: Callable[[Any], None],
        outcome: Callable[[], Any],
    ) -> None:
        if not self._is_unfinished(state):
            return
        self._spend(state, stage, "transfer", self._clock() - began)
        try:
            then(outcome())
        except OmniError as error:
            self._stage_failed(state, stage, error)
        except Exception as error:  # of one request, which must not stop the others
            logger.exception("Stage %r cannot go on with request %s.", stage.name, state.request_id)
            self._stage_failed(state, stage, StageError(f"Stage {stage.name!r}: its input could not be made: {error}"))

    def _take_one(self, stage_id: int, run: StageRun, output: Any) -> Any | None:
        """The output for vLLM's server, if any; other stages and the call get theirs."""
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
        if stage.id not in state.answered and run.dispatched_at is not None:
            state.answered.add(stage.id)
            self._spend(state, stage, "queue", run.dispatched_at - run.submitted_at)
            self._spend(state, stage, "first_output", self._clock() - run.dispatched_at)
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
        """The content of an output, if a stage or the call needs it."""
        reader = state.readers.get(stage.id)
        if reader is None:
            return _NOTHING_READ
        read = reader.read(output, run.finished)
        if read.finish_reason is not None and not run.finished:
            # It ends at a stop string, which the engine does not know.
            self._dispatchers[stage.id].abort((run,))
        return read

    def _answer(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any, read: StageOutput) -> Any:
        """The output for vLLM's server of the stage that answers through it."""
        api, cached_tokens = self._apis[stage.id], state.cached_tokens
        if cached_tokens is not None and run.attempts == 1 and stage.id in self._decodes:
            # Any later attempt computes the prompt itself, and reports the right number.
            api.set_cached_tokens(output, cached_tokens)
        if not run.finished:
            # The end of one turn of the session; vLLM's server expects one answer only.
            output.finish_reason = None
        return api.answer(output, read)

    def _pass_on(self, state: PipelineRequestState, stage: Stage, read: StageOutput, ended: bool) -> None:
        """Send a stage's output to the call and to the stages that work on chunks."""
        plan = state.plan
        if state.call is not None and stage.id in plan.shown:
            state.call.put(StageEvent(stage.name, read))
        for downstream in plan.downstream[stage.id]:
            if downstream.async_chunk:
                self._add_output(state, downstream, read, ended)
        if ended:
            self._end(state, stage)

    def _end(self, state: PipelineRequestState, stage: Stage) -> None:
        """A stage has ended: those that waited for it begin, or the request is complete."""
        state.ended[stage.id] = now = self._clock()
        self.pause_sequence.note_progress()
        run = state.runs.get(stage.id)
        if run is not None and run.dispatched_at is not None:
            self._spend(state, stage, "run", now - run.dispatched_at)
        if stage.id in state.final_output_stage_ids:
            state.finished_final_output_stage_ids.add(stage.id)
        if state.finished:
            if state.final_stage_id is None:
                self._put(self._apis[self._pipeline.prompt_stage.id].end(state.request_id))
            self._close_request(state, None)
            return
        for downstream in state.plan.downstream[stage.id]:
            inputs = {upstream.id for upstream in self._pipeline.upstream(downstream)}
            if downstream.id not in state.stage_submit_ts and inputs <= state.ended.keys():
                self._begin(state, downstream)

    def _stage_failed(self, state: PipelineRequestState, stage: Stage, error: OmniError) -> None:
        if not self._is_unfinished(state):
            return
        if stage.output is Modality.KV_CACHE:
            # The decode stage computes the prompt itself.
            self._end(state, stage)
        else:
            self._fail(state, error)

    def _cut_short(self, state: PipelineRequestState, stage: Stage, output: Any) -> Any | None:
        """An engine has ended a request early."""
        if self._apis[stage.id].refused(output):
            self._fail(state, NoReplicaError(f"Stage {stage.name!r} is paused. Please try again later."))
            return None
        if stage.output is Modality.KV_CACHE:
            self._end(state, stage)
            return None
        reader = state.readers.get(stage.id)
        read = _NOTHING_READ if reader is None else reader.read(output, True)
        if "error" in read.metadata:
            # A Python stage reports its error, and whether the request or the stage is at fault.
            kind = StageInputError if read.metadata.get("status") == HTTPStatus.BAD_REQUEST else StageError
            self._fail(state, kind(read.metadata["error"]))
            return None
        aborted = self._apis[stage.id].aborted(output)
        what = "was paused or put to sleep, which aborted the request" if aborted else "gave the request up"
        error = StageError(f"Stage {stage.name!r}: its engine {what}.")
        if stage.id != state.final_stage_id and not (aborted and state.call is None):
            self._fail(state, error)
            return None
        # vLLM's server reports it as it does without a pipeline.
        self._close_request(state, error)
        return output

    def _close_request(self, state: PipelineRequestState, error: Exception | None) -> None:
        """Nothing more comes for a request: abort what its stages still do. Without an error it is complete."""
        self._drop(state.request_id)
        self.pause_sequence.note_progress()
        for stage_id, run in state.runs.items():
            self._dispatchers[stage_id].abort((run,))
        self._tell_end(state, error)

    def _tell_end(self, state: PipelineRequestState, error: Exception | None) -> None:
        for stage_id, run in state.runs.items():
            if run.dispatched_at is not None and stage_id not in state.answered:
                self._spend(state, self._pipeline.stages[stage_id], "queue", run.dispatched_at - run.submitted_at)
        if state.traced:
            times = state.stage_times(self._pipeline.stages, self._clock())
            self._put(RequestStages(state.request_id, times))
        if state.call is not None:
            state.call.put(PipelineCallEnded(error, state.pipeline_timings))

    def _ends_front_alone(self, state: PipelineRequestState) -> bool:
        """End the front stage, since vLLM's server wants no more of it. False if its client has left altogether."""
        front = state.final_stage_id
        if front is None or front in state.ended:
            return front is not None
        stage = self._pipeline.stages[front]
        if front not in state.runs or (stage.is_vllm and front in state.readers):
            # A stop string would have ended the stage here as well, so the client must have left.
            return False
        self._dispatchers[front].abort((state.runs[front],))
        self._pass_on(state, stage, _END, ended=True)
        return True
