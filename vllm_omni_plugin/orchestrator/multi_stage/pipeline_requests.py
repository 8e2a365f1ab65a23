"""Requests of a pipeline: each runs through the stages it needs; their outputs become inputs of the next stages."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any

from vllm_omni_plugin.errors import NoReplicaError, OmniError, RequestRefusedError, StageError, StageInputError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.dispatch.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.multi_stage.request_state import PipelineRequestState, PrefilledCache, plan_request
from vllm_omni_plugin.orchestrator.requests import orchestrator_messages as messages
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.request_owner import RequestOwner, refuse
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RunEnded, StageRun, StreamingInputState
from vllm_omni_plugin.pipeline import Modality, Stage, StageOutput

logger = init_logger(__name__)

_EMPTY_OUTPUT = StageOutput()
_END = StageOutput(finish_reason="stop")


class PipelineRequests(RequestOwner[PipelineRequestState]):
    """Takes each request from stage to stage. `put` sends an item to AsyncLLM."""

    def __init__(
        self,
        input_builder: StageInputBuilder,
        dispatchers: Sequence[Dispatcher],
        gate: AdmissionGate | None,
        put: Callable[[Any], None],
        *,
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(put, None if gate is None else gate.request_ended)
        pipeline = self._pipeline = input_builder.pipeline
        self._apis = input_builder.apis
        self._dispatchers = dispatchers
        self._gate = gate
        self._input_builder = input_builder
        self._metrics = metrics
        self._clock = clock
        self._default_plan = plan_request(pipeline, None)

    def submit(self, message: messages.SubmitRequest) -> None:
        """Begin a request's first stages; an earlier one with the same id is aborted."""
        if message.request.abort_immediately:
            # Such a request frees the KV cache of a prefill outside the fleet. Here the prefill is a stage.
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

    def fail(self, message: messages.SubmitRequest, error: OmniError) -> None:
        if (state := self.states.get(message.request.request_id)) is None:
            refuse(message, error, self._put)
        else:
            self._fail(state, error)

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """Abort requests: `whole` if the client is gone; else vLLM has ended the text, and speech goes on."""
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is not None and (state.call is None or whole or not self._end_answering_stage(state)):
                self._close_request(state, StageError("The request was aborted."))

    def accept_outputs(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        answers = [self._handle_or_fail(stage_id, run, output) for run, output in accepted]
        return [answer for answer in answers if answer is not None]

    def runs_ended(self, stage_id: int, ended: Sequence[RunEnded]) -> None:
        stage = self._pipeline.stages[stage_id]
        for run, outputs, error in ended:
            if (state := self._state_of(stage_id, run)) is None:
                continue
            if isinstance(error, RequestRefusedError):
                # A refusal by admission ends the request even at an optional stage.
                self._fail(state, error)
            elif error is not None:
                self._stage_failed(state, stage, type(error)(f"Stage {stage.name!r}: {error}"))
            elif outputs is not None:
                outputs.outputs = self.accept_outputs(stage_id, [(run, output) for output in outputs.outputs])
                if outputs.outputs:
                    self._put(outputs)
            else:
                # The input of a session was closed after its last turn.
                if stage_id == state.plan.answer_stage:
                    self._put(self._apis[stage_id].end(state.request_id))
                self._pass_on(state, stage, _END, ended=True)

    def take_back_caches(self, stage_id: int, replica_id: int) -> None:
        """What a replica of a prefill has left is gone: decode must not fetch it, nor wait for it."""
        for state in self.states.values():
            prefill, cache = state.runs.get(stage_id), state.caches.get(stage_id)
            # One in a store outlives the replica.
            if prefill is None or prefill.replica_id != replica_id or cache is None or cache.params is None:
                continue
            del state.caches[stage_id]
            for decode in state.plan.downstream[stage_id]:
                if (run := state.runs.get(decode.id)) is not None:
                    self._dispatchers[decode.id].take_back_cache(run)

    def free_cache(self, prefill_id: int, request_id: str, params: Any, asked: Collection[int] = ()) -> None:
        """Have the cache freed that a prefill has left, if none of the stages that were `asked` is a decode of it."""
        for stage_id, request in self._input_builder.releases(request_id, prefill_id, params, asked):
            self.runs_ended(stage_id, self._dispatchers[stage_id].submit(StageRun(request_id, request, self._clock())))

    def close(self) -> None:
        states = list(self.states.values())
        super().close()
        for state in states:
            self._report_end(state, StageError("The server has shut down."))
        self._input_builder.close()

    def _fail(self, state: PipelineRequestState, error: OmniError) -> None:
        if self._is_unfinished(state):
            self._put(messages.RequestFailed(state.request_id, error))
            self._close_request(state, error)

    def _add_time(self, state: PipelineRequestState, stage: Stage, part: str, seconds: float) -> None:
        timings = state.pipeline_timings.setdefault(stage.name, {})
        timings[part] = timings.get(part, 0.0) + seconds
        self._metrics.observe_stage(stage.id, stage.name, part, seconds)

    def _new_state(self, message: messages.SubmitRequest) -> PipelineRequestState:
        if message.request.resumable:
            raise StageInputError("A pipeline takes whole prompts: streaming input is for a fleet of one stage.")
        plan = self._default_plan if message.call is None else plan_request(self._pipeline, message.call)
        if plan.answer_stage is not None:
            self._apis[plan.answer_stage].check_answerable(message.request)
        ticket = None if self._gate is None else self._gate.issue_ticket(message)
        return PipelineRequestState(
            message.request,
            ticket,
            plan=plan,
            call=message.call,
            chosen_replicas=message.chosen_replicas,
            traced=message.traced,
        )

    def _is_unfinished(self, state: PipelineRequestState) -> bool:
        """Safe to call from any thread."""
        return self.states.get(state.request_id) is state

    def _state_of(self, stage_id: int, run: StageRun) -> PipelineRequestState | None:
        state = self.states.get(run.request_id)
        return state if state is not None and state.runs.get(stage_id) is run else None

    def _begin(self, state: PipelineRequestState, stage: Stage) -> None:
        """Begin a stage whose upstream stages have all ended, or skip it if it is a prefill that cannot help."""
        if stage.output is Modality.KV_CACHE:
            tokens = len(state.request.prompt_token_ids or ())
            if tokens < stage.min_prompt_tokens or not self._dispatchers[stage.id].can_assign:
                self._end(state, stage)
                return
        state.stage_submit_ts[stage.id] = self._clock()
        work = partial(self._input_builder.build_whole, state, stage)
        self._run_on_thread(state, stage, work, partial(self._start_run, state, stage, None))

    def _start_run(
        self, state: PipelineRequestState, stage: Stage, session: StreamingInputState | None, requests: tuple[Any, Any]
    ) -> None:
        """Submit the run of a stage: with its whole input, or as a session with the first chunk."""
        api, (request, first_request) = self._apis[stage.id], requests
        cache = state.cache_of(self._pipeline.upstream(stage))
        if first_request is not None and cache is None:
            # The prefill's replica was lost while the request was built.
            first_request = request
        run = state.runs[stage.id] = StageRun(
            state.request_id,
            api.make_movable(request),
            self._clock(),
            streaming=session,
            chosen_replicas=state.chosen_replicas,
            first_request=first_request,
            first_until=inf if cache is None else cache.until,
            ticket=state.ticket_at(stage),
        )
        if stage.id in state.plan.readable:
            state.readers[stage.id] = api.reader(run.request)
        self.runs_ended(stage.id, self._dispatchers[stage.id].submit(run))

    def _add_input(self, state: PipelineRequestState, stage: Stage, output: StageOutput, last: bool) -> None:
        if (chunks := state.chunked_inputs.get(stage.id)) is None:
            chunks = state.chunked_inputs[stage.id] = ChunkedInput(stage.chunk_size)
            state.stage_submit_ts[stage.id] = self._clock()
        chunks.add(output, last)
        self._build_next_chunk(state, stage, chunks)

    def _build_next_chunk(self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput) -> None:
        chunk = chunks.next_chunk()
        if chunk is not None:
            work = partial(self._input_builder.build_chunk, state, stage, chunks, chunk)
            self._run_on_thread(state, stage, work, partial(self._chunk_built, state, stage, chunks, chunk.last))

    def _chunk_built(
        self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput, last: bool, requests: tuple[Any, Any]
    ) -> None:
        chunks.busy = False
        request, end = requests
        if request is not None:
            self._send_chunk(state, stage, chunks, request)
        if last and not chunks.begun:
            raise StageError(f"Stage {stage.name!r}: its transform returned nothing for the whole input.")
        if end is not None and self._is_unfinished(state):
            self._send_chunk(state, stage, chunks, end)
        if self._is_unfinished(state):
            self._build_next_chunk(state, stage, chunks)

    def _send_chunk(self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput, chunk: Any) -> None:
        if not chunks.begun:
            chunks.begun = True
            self._start_run(state, stage, StreamingInputState(replayable=True), (chunk, None))
            return
        run = state.runs[stage.id]
        if not run.finished:
            self.runs_ended(stage.id, self._dispatchers[stage.id].add_chunk(run, chunk))

    def _run_on_thread(
        self, state: PipelineRequestState, stage: Stage, work: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        """Run `work` on a thread of the stage, then pass its result to `then` on the loop."""
        done = partial(self._input_built, state, stage, self._clock(), then)
        self._input_builder.run_on_thread(stage, work, partial(self._is_unfinished, state), done)

    def _input_built(
        self,
        state: PipelineRequestState,
        stage: Stage,
        began: float,
        then: Callable[[Any], None],
        outcome: Callable[[], Any],
    ) -> None:
        if not self._is_unfinished(state):
            return
        self._add_time(state, stage, "transfer", self._clock() - began)
        try:
            then(outcome())
        except OmniError as error:
            self._stage_failed(state, stage, error)
        except BaseException as error:  # must not stop other requests; Rust code of tokenizers may panic
            logger.exception("Stage %r failed request %s.", stage.name, state.request_id)
            self._stage_failed(state, stage, StageError(f"Stage {stage.name!r}: its input could not be made: {error}"))

    def _handle_or_fail(self, stage_id: int, run: StageRun, output: Any) -> Any | None:
        """Handle one output; returns the output for AsyncLLM, if any."""
        state, stage = self._state_of(stage_id, run), self._pipeline.stages[stage_id]
        if state is None:
            return None
        try:
            return self._handle_output(state, stage, run, output)
        except BaseException as error:  # must not stop other requests; Rust code of tokenizers may panic
            logger.exception("Stage %r failed request %s.", stage.name, state.request_id)
            self._fail(state, StageError(f"Stage {stage.name!r}: its output could not be read: {error}"))
            return None

    def _handle_output(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any) -> Any | None:
        api = self._apis[stage.id]
        if stage.id not in state.answered and run.first_sent_at is not None:
            state.answered.add(stage.id)
            self._add_time(state, stage, "queue", run.first_sent_at - run.submitted_at)
            self._add_time(state, stage, "first_output", self._clock() - run.first_sent_at)
        if output.finish_reason is not None and api.cut_short(output):
            return self._cut_short(state, stage, output)
        if stage.output is Modality.KV_CACHE:
            if run.finished:
                params = output.kv_transfer_params
                until = inf if params is None else self._clock() + api.cache_lease_s
                state.caches[stage.id] = PrefilledCache(params, api.cached_tokens(output) or 0, until)
                self._end(state, stage)
            return None
        read, answer = self._read(state, stage, run, output), None
        if stage.id == state.plan.answer_stage:
            answer = self._answer(state, stage, run, output, read)
        self._pass_on(state, stage, read, run.finished)
        return answer

    def _read(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any) -> StageOutput:
        """The content of an output; empty if neither a stage nor the call needs it."""
        if (reader := state.readers.get(stage.id)) is None:
            return _EMPTY_OUTPUT
        read = reader.read(output, run.finished)
        if read.finish_reason is not None and not run.finished:
            # The output ends at a stop string, which the engine does not know.
            self._dispatchers[stage.id].finisher.abort((run,))
        return read

    def _answer(self, state: PipelineRequestState, stage: Stage, run: StageRun, output: Any, read: StageOutput) -> Any:
        """The client's answer: cached tokens are those of the prefill, unless decode computes the prompt itself."""
        api, cache = self._apis[stage.id], state.cache_of(self._pipeline.upstream(stage))
        if cache is not None and run.is_given_cache:
            api.set_cached_tokens(output, cache.cached_tokens)
        if not run.finished:
            # The end of a turn, not of the session: vLLM's server expects one answer.
            output.finish_reason = None
        return api.answer(output, read)

    def _pass_on(self, state: PipelineRequestState, stage: Stage, read: StageOutput, ended: bool) -> None:
        plan = state.plan
        if state.call is not None and stage.id in plan.shown:
            state.call.put(messages.StageEvent(stage.name, read))
        for downstream in plan.downstream[stage.id]:
            if downstream.async_chunk:
                self._add_input(state, downstream, read, ended)
        if ended:
            self._end(state, stage)

    def _end(self, state: PipelineRequestState, stage: Stage) -> None:
        """A stage has ended: begin the stages that waited for it, or complete the request."""
        state.ended[stage.id] = now = self._clock()
        run = state.runs.get(stage.id)
        if run is not None and run.first_sent_at is not None:
            self._add_time(state, stage, "run", now - run.first_sent_at)
        if state.finished:
            if state.plan.answer_stage is None:
                self._put(self._apis[self._pipeline.prompt_stage.id].end(state.request_id))
            self._close_request(state, None)
            return
        for downstream in state.plan.downstream[stage.id]:
            inputs = {upstream.id for upstream in self._pipeline.upstream(downstream)}
            if downstream.id not in state.stage_submit_ts and inputs <= state.ended.keys():
                self._begin(state, downstream)

    def _stage_failed(self, state: PipelineRequestState, stage: Stage, error: OmniError) -> None:
        """End the request; a failed prefill is only skipped, since decode computes the prompt itself."""
        if not self._is_unfinished(state):
            return
        if stage.output is Modality.KV_CACHE:
            self._end(state, stage)
        else:
            self._fail(state, error)

    def _cut_short(self, state: PipelineRequestState, stage: Stage, output: Any) -> Any | None:
        """An engine has ended a request early: paused (503), a stage's own error (400, 500), or given up."""
        if self._apis[stage.id].refused(output):
            self._fail(state, NoReplicaError(f"Stage {stage.name!r} is paused. Please try again later."))
            return None
        if stage.output is Modality.KV_CACHE:
            self._end(state, stage)
            return None
        reader = state.readers.get(stage.id)
        read = _EMPTY_OUTPUT if reader is None else reader.read(output, True)
        if "error" in read.metadata:
            # The error of a Python stage; its status says whether the request or the stage is at fault.
            kind = StageInputError if read.metadata.get("status") == HTTPStatus.BAD_REQUEST else StageError
            self._fail(state, kind(read.metadata["error"]))
            return None
        aborted = self._apis[stage.id].aborted(output)
        what = "was paused or put to sleep, which aborted the request" if aborted else "gave the request up"
        error = StageError(f"Stage {stage.name!r}: its engine {what}.")
        if stage.id != state.plan.answer_stage and not (aborted and state.call is None):
            self._fail(state, error)
            return None
        # vLLM's server reports it as it does without a pipeline.
        self._close_request(state, error)
        return output

    def _close_request(self, state: PipelineRequestState, error: Exception | None) -> None:
        self._drop(state.request_id)
        for stage_id, run in state.runs.items():
            self._dispatchers[stage_id].finisher.abort((run,))
        asked = {stage_id for stage_id, run in state.runs.items() if run.attempts}
        for prefill_id, cache in state.caches.items():
            self.free_cache(prefill_id, state.request_id, cache.params, asked)
        self._report_end(state, error)

    def _report_end(self, state: PipelineRequestState, error: Exception | None) -> None:
        for stage_id, run in state.runs.items():
            if run.first_sent_at is not None and stage_id not in state.answered:
                self._add_time(state, self._pipeline.stages[stage_id], "queue", run.first_sent_at - run.submitted_at)
        if state.traced:
            self._put(messages.RequestStages(state.request_id, state.stage_times(self._pipeline.stages, self._clock())))
        if state.call is not None:
            state.call.put(messages.PipelineCallEnded(error, state.pipeline_timings))

    def _end_answering_stage(self, state: PipelineRequestState) -> bool:
        """End the answering stage, whose answer vLLM's server has ended. False: the client has left."""
        stage_id = state.plan.answer_stage
        if stage_id is None or stage_id in state.ended:
            return stage_id is not None
        stage = self._pipeline.stages[stage_id]
        if stage_id not in state.runs or (stage.is_vllm and stage_id in state.readers):
            # The reader would have found a stop string, so the client must have left.
            return False
        self._dispatchers[stage_id].finisher.abort((state.runs[stage_id],))
        self._pass_on(state, stage, _END, ended=True)
        return True
