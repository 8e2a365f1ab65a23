"""Making the inputs of stages on threads, so that the orchestrator's loop never waits for it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_omni_plugin.errors import StageError, StageInputError
from vllm_omni_plugin.orchestrator.pipeline.chunked_input import ChunkedInput, OutputChunk
from vllm_omni_plugin.orchestrator.pipeline.request_state import PipelineRequestState
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Pipeline, Stage
from vllm_omni_plugin.pipeline.output_reader import joined
from vllm_omni_plugin.pipeline.transfer import InputPart, StageInput, StageOutput, Transfer, Transform
from vllm_omni_plugin.pipeline.transforms import check_input, resolve_transform

if TYPE_CHECKING:
    # Imports vLLM, which nothing here does.
    from vllm_omni_plugin.vllm_api.stages.stage_api import StageApi

_THREADS = 2
"""For each stage, so that one slow transform does not keep the other requests of its stage waiting."""


class DaemonThreads:
    """Runs calls in order. Unlike those of a `ThreadPoolExecutor`, its threads do not keep the process from ending.

    Args:
        count: calls that run at once, at most.
        name: the threads' names begin with it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count = count
        self._started = 0
        self._closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Run a call, which must not raise. Nothing happens once this is closed."""
        if self._closed:
            return
        self._calls.put(call)
        if self._started < self._count:
            Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True).start()
            self._started += 1

    def close(self) -> None:
        """Drop what waits; what runs ends by itself, and then its thread. Idempotent."""
        self._closed = True
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in range(self._started):
            self._calls.put(None)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            # What it holds is not to live until the next one comes.
            del call


class RunRequests(NamedTuple):
    """What begins a stage's run.

    Attributes:
        request: of its engine.
        first_request: what the first attempt sends in its place, if anything.
    """

    request: Any
    first_request: Any = None


class ChunkRequests(NamedTuple):
    """What a piece of the output in front becomes.

    Attributes:
        request: of the engine; None if the piece gives nothing yet.
        end: what closes the input, with the last piece.
    """

    request: Any
    end: Any


class StageInputBuilder:
    """Runs transforms and builds requests of the engines, with threads of its own for each stage.

    Args:
        pipeline: the stages.
        apis: of the stages, by stage id.
        prompt_text: the text of a client's request; called on those threads.

    Attributes:
        pipeline: as above.
        apis: as above.

    Raises:
        ConfigError: a transform cannot be found.
    """

    def __init__(self, pipeline: Pipeline, apis: "Sequence[StageApi]", prompt_text: Callable[[Any], str]) -> None:
        self.pipeline = pipeline
        self.apis = apis
        self._prompt_text = prompt_text
        self._names = {stage.id: pipeline.transform_of(stage) for stage in pipeline.stages}
        self._transforms = {
            stage.id: _guarded(stage, transform)
            for stage in pipeline.stages
            if (name := self._names[stage.id]) is not None and (transform := resolve_transform(name)) is not None
        }
        # Those whose transforms may read the prompt's text.
        self._readers = frozenset(self._transforms) - {
            stage_id for stage_id, name in self._names.items() if name in list(BuiltInTransform)
        }
        self._threads = {stage.id: DaemonThreads(_THREADS, f"omni-{stage.name}") for stage in pipeline.stages}

    def prepare(
        self,
        stage: Stage,
        work: Callable[[], Any],
        wanted: Callable[[], bool],
        done: Callable[[Callable[[], Any]], None],
    ) -> None:
        """Do work for a stage, then tell the running loop.

        Args:
            stage: whose threads do it.
            work: what to do.
            wanted: whether it still is to be done when its turn comes; called on a thread.
            done: called on the loop with what returns or raises the outcome.
        """
        loop = asyncio.get_running_loop()

        def run() -> None:
            outcome: Future[Any] = Future()
            try:
                outcome.set_result(work() if wanted() else None)
            except BaseException as error:  # raised where the outcome is wanted
                outcome.set_exception(error)
            # The loop may have ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(done, outcome.result)
            # An error refers to this frame, which must not refer to the error in turn.
            del outcome

        self._threads[stage.id].submit(run)

    def whole(self, state: PipelineRequestState, stage: Stage) -> RunRequests:
        """The input of a stage when all stages in front of it have ended. Runs on a thread.

        Raises:
            StageError: it cannot be made.
        """
        api, source = self.apis[stage.id], state.request
        sampling, for_client = _sampling(state, stage)
        if stage.output is Modality.KV_CACHE:
            return RunRequests(api.build_root(source, {}, for_client=False))
        if self._names[stage.id] == BuiltInTransform.KV_TRANSFER:
            request, params = (
                api.make_movable(api.build_root(source, sampling, for_client=for_client)),
                state.cache_params,
            )
            # The cache can be fetched once, so only the first attempt gets the parameters.
            return RunRequests(request, None if params is None else api.with_kv_transfer(request, params))
        if stage.id not in self._transforms:
            return RunRequests(api.build_root(source, sampling, for_client=for_client))
        readers = state.readers
        outputs = {upstream.name: readers[upstream.id].whole for upstream in self.pipeline.upstream(stage)}
        given = self._transformed(state, stage, outputs)
        if given is None:
            raise StageError(f"Stage {stage.name!r}: its transform {self._names[stage.id]!r} returned nothing.")
        return RunRequests(api.build(source, given, sampling, for_client=for_client))

    def chunk(
        self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput, piece: OutputChunk
    ) -> ChunkRequests:
        """A chunk of a stage's input. Runs on a thread, one at a time for each `ChunkedInput`.

        Raises:
            StageError: it cannot be made.
        """
        api, source = self.apis[stage.id], state.request
        sampling, for_client = _sampling(state, stage)
        outputs = {stage.inputs[0]: joined(piece.outputs)}
        given = self._transformed(state, stage, outputs, chunks.memory, piece.number, piece.last)
        request = None
        if given is None and piece.last and not stage.is_vllm:
            # It may have something to say when its input ends.
            given = StageInput()
        if given is not None:
            request = api.build(
                source, given, sampling, for_client=for_client, part=InputPart(True, piece.last, chunks.held)
            )
            chunks.held += api.session_tokens(request)
        return ChunkRequests(request, api.build_end(source) if piece.last else None)

    def close(self) -> None:
        """Wait for nothing; what runs ends by itself. Idempotent."""
        for threads in self._threads.values():
            threads.close()

    def _transformed(
        self,
        state: PipelineRequestState,
        stage: Stage,
        outputs: Mapping[str, StageOutput],
        memory: dict[str, Any] | None = None,
        number: int = 0,
        last: bool = True,
    ) -> StageInput | None:
        transfer = Transfer(
            request_id=state.request_id,
            stage=stage.name,
            prompt_token_ids=state.request.prompt_token_ids or (),
            prompt=self._prompt(state) if stage.id in self._readers else "",
            params=state.call.params if state.call is not None else {},
            chunk=number,
            last=last,
            memory={} if memory is None else memory,
        )
        return check_input(self._transforms[stage.id](outputs, transfer), stage.name)

    def _prompt(self, state: PipelineRequestState) -> str:
        # Two threads may both find it missing, and then both find the same.
        if state.prompt is None:
            state.prompt = self._prompt_text(state.request)
        return state.prompt


def _sampling(state: PipelineRequestState, stage: Stage) -> tuple[Mapping[str, Any], bool]:
    """The request's parameters for a stage, and whether the client's own are for it, too."""
    return state.sampling_params_list[stage.id], stage.id == state.plan.client_sampled


def _guarded(stage: Stage, transform: Transform) -> Transform:
    """A transform whose errors name the stage."""

    def guarded(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
        try:
            return transform(outputs, transfer)
        except StageInputError as error:
            raise StageInputError(f"Stage {stage.name!r}: {error}") from error
        except BaseException as error:  # SystemExit, too, must not end the loop
            raise StageError(f"Stage {stage.name!r}: its transform failed: {type(error).__name__}: {error}") from error

    return guarded
