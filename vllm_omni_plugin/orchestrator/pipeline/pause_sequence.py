"""Pausing the stages of a pipeline without leaving requests between two stages."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

from vllm_omni_plugin.orchestrator.pipeline.request_state import PipelineRequestState
from vllm_omni_plugin.pipeline import Pipeline, Stage
from vllm_omni_plugin.vllm_api.requests.pause_state import PAUSE_CALLS, pause_mode


class PauseSequence:
    """The order in which stages are paused: from the first stage on. Lives on the orchestrator's loop.

    A stage that is paused before its input has arrived would keep requests that should end.

    Args:
        states: returns the unfinished requests.
    """

    def __init__(self, pipeline: Pipeline, states: Callable[[], Collection[PipelineRequestState]]) -> None:
        self._pipeline = pipeline
        self._states = states
        self._progress = asyncio.Event()
        self._pause_calls = 0

    def note_progress(self) -> None:
        """A request has begun or ended a stage, or has ended."""
        self._progress.set()

    async def steps(
        self, method: str, args: tuple[Any, ...], served: Collection[int]
    ) -> AsyncGenerator[tuple[int, ...] | None, None]:
        """Yield the ids of the stages to call in each step, when it is time for it; None: all stages at once.

        A later pause call ends the sequence.

        Args:
            method: method of vLLM's engine core.
            served: ids of the stages that have replicas. Other stages are called together with one of these.
        """
        self._pause_calls += method in PAUSE_CALLS
        mode, number = pause_mode(method, args), self._pause_calls
        if mode not in ("abort", "wait"):
            yield None
            return
        for stages in self._groups(served):
            await self._until_ended([stage for stage in stages if stage.id in served], begun=mode == "abort")
            if self._pause_calls != number:
                return
            yield tuple(stage.id for stage in stages)

    def _groups(self, served: Collection[int]) -> list[list[Stage]]:
        groups: list[list[Stage]] = [[]]
        for level in self._pipeline.levels:
            if any(stage.id in served for stage in groups[-1]) and any(stage.id in served for stage in level):
                groups.append([])
            groups[-1] += level
        return groups

    async def _until_ended(self, stages: Collection[Stage], begun: bool) -> None:
        """Return when these stages have ended the work whose inputs exist now; `begun`: when engines have the work."""
        work = [(state, stage) for state in self._states() for stage in stages if self._waits(state, stage, begun)]
        while work:
            self._progress.clear()
            await self._progress.wait()
            unfinished = set(map(id, self._states()))
            work = [each for each in work if id(each[0]) in unfinished and self._waits(*each, begun)]

    def _waits(self, state: PipelineRequestState, stage: Stage, begun: bool) -> bool:
        """Whether a stage has all its input for a request, and has not ended (or begun) its work on it."""
        if not stage.inputs or stage.id not in state.plan.downstream or stage.id in state.ended:
            return False
        if begun and stage.id in state.runs:
            return False
        return all(upstream.id in state.ended for upstream in self._pipeline.upstream(stage))
