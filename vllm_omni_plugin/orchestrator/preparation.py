"""Making the inputs of stages on threads, so that the orchestrator's loop never waits for it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

from vllm_omni_plugin.errors import OmniError, StageError
from vllm_omni_plugin.orchestrator.feed import Feed, Piece
from vllm_omni_plugin.orchestrator.journey import Journey
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.stage_api import KvStageApi, StageApi
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Pipeline, Stage
from vllm_omni_plugin.pipeline.transfer import StageInput, StageOutput, Transfer, Transform
from vllm_omni_plugin.pipeline.transforms import check_input, resolve_transform

_THREADS = 2
"""For each stage, so that one slow transform does not keep the other requests of its stage waiting."""

Work = Callable[[], Any]


class Preparation:
    """Runs transforms and builds requests of the engines, with threads of its own for each stage.

    Args:
        pipeline: the stages.
        apis: of the stages, by stage id.
        prompt_text: the text of a client's request; called on those threads.

    Raises:
        ConfigError: a transform cannot be found.
    """

    def __init__(self, pipeline: Pipeline, apis: Sequence[StageApi], prompt_text: Callable[[Any], str]) -> None:
        self._pipeline = pipeline
        self._apis = apis
        self._prompt_text = prompt_text
        self._transforms = {
            stage.id: _guarded(stage, transform)
            for stage in pipeline.stages
            if (name := pipeline.transform_of(stage)) is not None and (transform := resolve_transform(name)) is not None
        }
        self._threads = {
            stage.id: ThreadPoolExecutor(_THREADS, thread_name_prefix=f"omni-{stage.name}") for stage in pipeline.stages
        }

    def prepare(self, stage: Stage, work: Work, done: Callable[[Callable[[], Any]], None]) -> None:
        """Do work for a stage, then call `done` on the running loop with what returns or raises its outcome."""
        loop = asyncio.get_running_loop()

        def tell(future: "Future[Any]") -> None:
            # A loop that has ended serves nobody any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(done, future.result)

        self._threads[stage.id].submit(work).add_done_callback(tell)

    def work(self, state: OrchestratorRequestState, journey: Journey, stage: Stage) -> Work:
        """What makes the request of a stage whose inputs are whole."""
        api, source = self._apis[stage.id], state.request
        sampling, front = state.sampling_params_list[stage.id], stage.id == journey.plan.client_sampled
        if stage.output is Modality.KV_CACHE:
            return partial(_kv(api).build_prefill, source)
        if self._pipeline.transform_of(stage) == BuiltInTransform.KV_TRANSFER:
            return partial(_kv(api).build_decode, source, journey.cache_params)
        if stage.id not in self._transforms:
            return partial(api.build_root, source, sampling, front=front)
        outputs = {upstream.name: journey.readers[upstream.id].whole for upstream in self._pipeline.upstream(stage)}

        def build() -> Any:
            given = self._transformed(state, stage, outputs)
            if given is None:
                raise StageError(f"Stage {stage.name!r}: its transform {self._name(stage)!r} returned nothing.")
            return api.build(source, given, sampling, front=front, resumable=False, last=True)

        return build

    def chunk_work(
        self, state: OrchestratorRequestState, journey: Journey, stage: Stage, feed: Feed, piece: Piece
    ) -> Work:
        """What makes a pair of one chunk of a stage's input, and what closes the input if it is the last; else None."""
        api, source = self._apis[stage.id], state.request
        sampling, front = state.sampling_params_list[stage.id], stage.id == journey.plan.client_sampled
        (upstream,) = self._pipeline.upstream(stage)

        def build() -> tuple[Any | None, Any | None]:
            given = self._transformed(state, stage, {upstream.name: piece.output}, feed, piece)
            chunk = None
            if given is None and piece.last and not stage.is_vllm:
                # It may have something to say when its input ends.
                given = StageInput()
            if given is not None:
                chunk = api.build(source, given, sampling, front=front, resumable=True, last=piece.last)
            return chunk, api.build_end(source) if piece.last else None

        return build

    def close(self) -> None:
        """Wait for nothing; what runs ends by itself. Idempotent."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _transformed(
        self,
        state: OrchestratorRequestState,
        stage: Stage,
        outputs: Mapping[str, StageOutput],
        feed: Feed | None = None,
        piece: Piece | None = None,
    ) -> StageInput | None:
        source = state.request
        transfer = Transfer(
            request_id=state.request_id,
            stage=stage.name,
            prompt_token_ids=source.prompt_token_ids or (),
            prompt="" if self._name(stage) in list(BuiltInTransform) else self._prompt_text(source),
            params=state.call.params if state.call is not None else {},
            chunk=piece.number if piece is not None else 0,
            last=piece is None or piece.last,
            memory=feed.memory if feed is not None else {},
        )
        return check_input(self._transforms[stage.id](outputs, transfer), stage.name)

    def _name(self, stage: Stage) -> str | None:
        return self._pipeline.transform_of(stage)


def _guarded(stage: Stage, transform: Transform) -> Transform:
    """A transform whose errors name the stage."""

    def guarded(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
        try:
            return transform(outputs, transfer)
        except OmniError:
            raise
        except Exception as error:
            raise StageError(f"Stage {stage.name!r}: its transform failed: {type(error).__name__}: {error}") from error

    return guarded


def _kv(api: StageApi) -> KvStageApi:
    # A pipeline is checked to have stages of vLLM's only where a KV cache is handed over.
    return cast(KvStageApi, api)
