"""Bringing the stages of a pipeline to rest without leaving requests between two of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

from vllm_omni_plugin.orchestrator.request_state import PipelineRequestState
from vllm_omni_plugin.pipeline import Pipeline, Stage
from vllm_omni_plugin.vllm_api.rest_state import REST_CALLS, pause_mode


class PauseOrder:
    """The order in which stages are told to rest. Lives on the orchestrator's loop.

    A pipeline comes to rest from its beginning: a stage that rests before it has what is still on its way to it would
    hold requests that are meant to end.

    Args:
        pipeline: the stages.
        states: the unfinished requests.
    """

    def __init__(self, pipeline: Pipeline, states: Callable[[], Collection[PipelineRequestState]]) -> None:
        self._pipeline = pipeline
        self._states = states
        self._progress = asyncio.Event()
        self._rest_calls = 0

    def note_progress(self) -> None:
        """A request has begun or ended a stage, or has ended."""
        self._progress.set()

    async def turns(
        self, method: str, args: tuple[Any, ...], staffed: Collection[int]
    ) -> AsyncGenerator[tuple[int, ...] | None, None]:
        """The stages that a call reaches at once, then those that it may reach next; None: it reaches all at once.

        Args:
            method: method of vLLM's engine core.
            args: its arguments.
            staffed: ids of the stages that have replicas; the others are told together with them.
        """
        self._rest_calls += method in REST_CALLS
        mode, number = pause_mode(method, args), self._rest_calls
        if mode not in ("abort", "wait"):
            yield None
            return
        for stages in self._turns(staffed):
            await self._until_passed([stage for stage in stages if stage.id in staffed], begun=mode == "abort")
            if self._rest_calls != number:
                # Another call says otherwise meanwhile.
                return
            yield tuple(stage.id for stage in stages)

    def _turns(self, staffed: Collection[int]) -> list[list[Stage]]:
        turns: list[list[Stage]] = [[]]
        for level in self._pipeline.levels:
            if any(stage.id in staffed for stage in turns[-1]) and any(stage.id in staffed for stage in level):
                turns.append([])
            turns[-1] += level
        return turns

    async def _until_passed(self, stages: Collection[Stage], begun: bool) -> None:
        """Return when these stages have ended all work that those in front of them have made for them until now.

        Args:
            stages: when those in front of them rest.
            begun: whether it is enough that their engines have it.
        """
        owed = [(state, stage) for state in self._states() for stage in stages if self._owes(state, stage, begun)]
        while owed:
            self._progress.clear()
            await self._progress.wait()
            unfinished = set(map(id, self._states()))
            owed = [each for each in owed if id(each[0]) in unfinished and self._owes(*each, begun)]

    def _owes(self, state: PipelineRequestState, stage: Stage, begun: bool) -> bool:
        if not stage.inputs or stage.id not in state.plan.downstream or stage.id in state.ended:
            return False
        if begun and stage.id in state.runs:
            return False
        return all(upstream.id in state.ended for upstream in self._pipeline.upstream(stage))
