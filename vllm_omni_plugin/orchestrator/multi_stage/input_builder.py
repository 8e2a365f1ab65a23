"""Builds the inputs of stages on threads, so that the orchestrator's loop never waits for a transform."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import StageError, StageInputError, text_of
from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput, OutputChunk
from vllm_omni_plugin.orchestrator.multi_stage.request_state import PipelineRequestState
from vllm_omni_plugin.other_loop import call_on
from vllm_omni_plugin.pipeline import (
    BuiltInTransform,
    Modality,
    Pipeline,
    Stage,
    StageInput,
    StageOutput,
    Transfer,
    Transform,
)
from vllm_omni_plugin.pipeline.output_reader import joined
from vllm_omni_plugin.pipeline.transfer import InputPart
from vllm_omni_plugin.pipeline.transforms import check_input, resolve_transform

if TYPE_CHECKING:
    # Imports vLLM; the modules of this package must not.
    from vllm_omni_plugin.vllm_api.vllm_stages.stage_api import StageApi

_THREADS_PER_STAGE = 2
"""More than one, so that a slow transform does not block the other requests of its stage."""


class DaemonThreads:
    """Runs calls in order on daemon threads: unlike a `ThreadPoolExecutor`, they let the process end."""

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count = count
        self._started = 0
        self._closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Run a call, which must not raise. Does nothing after `close`."""
        if self._closed:
            return
        self._calls.put(call)
        if self._started < self._count:
            Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True).start()
            self._started += 1

    def close(self) -> None:
        """Drop the queued calls; each thread ends after its current call. Idempotent."""
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
            # Otherwise its references would live until the next call.
            del call


class StageInputBuilder:
    """Runs transforms and builds engine requests. Each stage has threads of its own, which call `prompt_text`, too.

    Raises ConfigError if a transform cannot be found.
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
        # Stages whose transforms may read the prompt's text.
        self._readers = frozenset(self._transforms) - {
            stage_id for stage_id, name in self._names.items() if name in list(BuiltInTransform)
        }
        self._threads = {stage.id: DaemonThreads(_THREADS_PER_STAGE, f"omni-{stage.name}") for stage in pipeline.stages}

    def run_on_thread(
        self,
        stage: Stage,
        work: Callable[[], Any],
        wanted: Callable[[], bool],
        done: Callable[[Callable[[], Any]], None],
    ) -> None:
        """Run `work` on a thread of the stage if it is still `wanted` there, then `done` on the running loop.

        `done` gets a function that returns the result of `work` or raises its error.
        """
        loop = asyncio.get_running_loop()

        def run() -> None:
            outcome: Future[Any] = Future()
            try:
                outcome.set_result(work() if wanted() else None)
            except BaseException as error:
                outcome.set_exception(error)
            call_on(loop, done, outcome.result)
            # Breaks the reference cycle between an error and this frame.
            del outcome

        self._threads[stage.id].submit(run)

    def releases(
        self, request_id: str, prefill_id: int, params: Mapping[str, Any] | None, asked: Collection[int]
    ) -> Iterator[tuple[int, Any]]:
        """The requests of decode stages that free a cache which none was asked to fetch; its lease would keep it."""
        for decode in self.pipeline.downstream(self.pipeline.stages[prefill_id]):
            if params is not None and decode.id not in asked:
                request = self.apis[decode.id].release(request_id, params)
                if request is not None:
                    yield decode.id, request

    def build_whole(self, state: PipelineRequestState, stage: Stage) -> tuple[Any, Any]:
        """Build the input of a stage whose upstream stages have all ended. Runs on a thread.

        Returns the engine request, and the one that the first attempt sends instead, or None. Raises StageError if the
        transform failed, as does `build_chunk`.
        """
        api, source = self.apis[stage.id], state.request
        sampling, for_client = _sampling(state, stage)
        if stage.output is Modality.KV_CACHE:
            return api.build_root(source, {}, for_client=False), None
        if self._names[stage.id] == BuiltInTransform.KV_TRANSFER:
            request = api.make_movable(api.build_root(source, sampling, for_client=for_client))
            prefills = self.pipeline.upstream(stage)
            if prefills[0].id not in state.runs:
                return request, None
            # The cache can be fetched only once, from the incarnation that made it, and may be what ended the engine. A
            # connector may find it again without parameters, or half of one, so other attempts read no cache.
            again = api.without_cache(request)
            if (cache := state.cache_of(prefills)) is None:
                return again, again
            return again, request if cache.params is None else api.with_kv_transfer(request, cache.params)
        if stage.id not in self._transforms:
            return api.build_root(source, sampling, for_client=for_client), None
        readers = state.readers
        outputs = {upstream.name: readers[upstream.id].whole for upstream in self.pipeline.upstream(stage)}
        given = self._transformed(state, stage, outputs)
        if given is None:
            raise StageError(f"Stage {stage.name!r}: its transform {self._names[stage.id]!r} returned nothing.")
        return api.build(source, given, sampling, for_client=for_client), None

    def build_chunk(
        self, state: PipelineRequestState, stage: Stage, chunks: ChunkedInput, chunk: OutputChunk
    ) -> tuple[Any, Any]:
        """Build one chunk of a stage's input. Runs on a thread; one call at a time for each `ChunkedInput`.

        Returns the request, None if the transform returned nothing; and, for the last chunk, the one that ends the
        input.
        """
        api, source = self.apis[stage.id], state.request
        sampling, for_client = _sampling(state, stage)
        outputs = {stage.inputs[0]: joined(chunk.outputs)}
        given = self._transformed(state, stage, outputs, chunks.memory, number=chunk.number, last=chunk.last)
        request = None
        if given is None and chunk.last and not stage.is_vllm:
            # A Python stage may produce output when its input ends.
            given = StageInput()
        if given is not None:
            request = api.build(
                source, given, sampling, for_client=for_client, part=InputPart(True, chunk.last, chunks.session_tokens)
            )
            chunks.session_tokens += api.session_tokens(request)
        return request, api.build_end(source) if chunk.last else None

    def close(self) -> None:
        """Drop the queued work, without waiting for running work. Idempotent."""
        for threads in self._threads.values():
            threads.close()

    def _transformed(
        self,
        state: PipelineRequestState,
        stage: Stage,
        outputs: Mapping[str, StageOutput],
        memory: dict[str, Any] | None = None,
        *,
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
        # Two threads may both compute it, with the same result.
        if state.prompt is None:
            state.prompt = self._prompt_text(state.request)
        return state.prompt


def _sampling(state: PipelineRequestState, stage: Stage) -> tuple[Mapping[str, Any], bool]:
    sampling = {} if state.call is None else state.call.sampling.get(stage.name, {})
    return sampling, stage.id == state.plan.client_sampled


def _guarded(stage: Stage, transform: Transform) -> Transform:
    """The transform, with errors that name the stage."""

    def guarded(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
        try:
            return transform(outputs, transfer)
        except StageInputError as error:
            raise StageInputError(f"Stage {stage.name!r}: {text_of(error)}") from error
        except BaseException as error:  # a transform may raise SystemExit
            what = f"{type(error).__name__}: {text_of(error)}"
            raise StageError(f"Stage {stage.name!r}: its transform failed: {what}") from error

    return guarded
