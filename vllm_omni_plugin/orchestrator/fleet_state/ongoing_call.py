"""A call to all replicas of some stages, from its record to what it came to, and what AsyncLLM's side is told of it."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA
from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCall, StageCalls
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter

_LONGEST_S = 10.0
_SLEEP_CALLS = frozenset({"sleep", "wake_up"})


@dataclass(frozen=True, slots=True)
class EngineStateUpdate:
    """Another head has loaded or unloaded adapters, or put the engines to sleep.

    Attributes:
        loaded: adapters that can be asked for from now on, or under whose name there is another one now.
        unloaded: ids of those that cannot any more.
        sleep_level: how deep the engines sleep now, 0 while they have their weights; None: as before.
        applied: done when that holds here.
    """

    loaded: tuple[Adapter, ...]
    unloaded: tuple[int, ...]
    sleep_level: int | None
    applied: "Future[None]"


@dataclass(frozen=True, slots=True)
class EngineStateView:
    """What AsyncLLM's side knows of the engines at one moment."""

    adapters: dict[int, Adapter]
    sleep_level: int

    @classmethod
    def of(cls, states: Sequence[SharedState]) -> "EngineStateView":
        """The view of stages in these states; they sleep as deep as the first."""
        adapters = {adapter.lora_int_id: adapter for state in states for adapter in state.adapters}
        return cls(adapters, states[0].sleep_level)

    def difference(self, now: "EngineStateView") -> EngineStateUpdate | None:
        """What has to be told of a change from this view to another, None if there is nothing."""
        loaded = tuple(a for lora_id, a in now.adapters.items() if self.adapters.get(lora_id) != a)
        unloaded = tuple(self.adapters.keys() - now.adapters.keys())
        level = now.sleep_level if now.sleep_level != self.sleep_level else None
        return EngineStateUpdate(loaded, unloaded, level, Future()) if loaded or unloaded or level is not None else None


async def tell(tell_front: Callable[[Any], None], news: EngineStateUpdate | None) -> None:
    """Tell AsyncLLM's side; returns when it has applied that, or takes too long for that."""
    if news is not None:
        tell_front(news)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                await asyncio.wrap_future(news.applied)


@dataclass(eq=False, slots=True)
class OngoingCall:
    """A call that is recorded, and on its way to the replicas that this head calls.

    Attributes:
        number: the fleet's; 0 for one that other heads do not follow.
        method: of vLLM's engine core.
        args: its arguments.
        calls: the call in each of its stages.
        sending: done when all of these have answered or failed.
        unreached: engine keys of replicas that the other heads leave to this one, which has lost them since.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    calls: list[StageCall]
    sending: "asyncio.Future[Any]"
    unreached: Collection[int] = ()

    @classmethod
    def begin(
        cls,
        stages: Sequence[StageCalls],
        method: str,
        args: tuple[Any, ...],
        told: Collection[int] | None = None,
        number: int = 0,
    ) -> "OngoingCall":
        """Record a call and begin to send it, in this step. For `told` see `StageCalls.begin`."""
        calls = [stage.begin(method, args, told) for stage in stages]
        return cls(number, method, args, calls, _sending(calls))

    def again(self) -> "OngoingCall":
        """The same call, which is recorded, sent to all replicas."""
        calls = [replace(call, members=call.stage.members, answers=[], cleared=[]) for call in self.calls]
        return OngoingCall(self.number, self.method, self.args, calls, _sending(calls))

    async def taken(self) -> list[bool]:
        """Wait for the answers, settle the record, and take out replicas that failed what others of their stage took.

        Returns:
            For each stage, whether any engine took the call.
        """
        try:
            await self.sending
        except BaseException:
            self.settle(False)
            raise
        # A stage without replicas goes with the others: what they have taken, its first replica is told.
        anywhere = any(call.results for call in self.calls)
        taken = [
            self.method == FORGET_LORA or (bool(call.results) if call.members else anywhere) for call in self.calls
        ]
        for call, was_taken in zip(self.calls, taken, strict=True):
            call.settle(was_taken)
            call.stage.distrust_the_different(call, was_taken)
        return taken

    def settle(self, taken: bool) -> None:
        """Settle the record of all stages alike."""
        for call in self.calls:
            call.settle(taken)

    def engine_state_update(self) -> EngineStateUpdate | None:
        """What AsyncLLM's side has to be told of the call if another head made it, None if there is nothing."""
        if not self.calls:
            return None
        method, args, shared = self.method, self.args, self.calls[0].stage.shared
        known = {adapter.lora_int_id for adapter in shared.adapters}
        loaded = args if method == "add_lora" and args[0].lora_int_id in known else ()
        unloaded = args if method == FORGET_LORA else ()
        sleep_level = shared.sleep_level if method in _SLEEP_CALLS else None
        if not loaded and not unloaded and sleep_level is None:
            return None
        return EngineStateUpdate(loaded, unloaded, sleep_level, Future())

    def results(self) -> list[Any]:
        """What the replicas answered that took it.

        Raises:
            ReplicaError: none of a stage took it, or a server does not let heads make this call.
        """
        for call in self.calls:
            if call.refused:
                raise call.answers[0]
            if call.not_allowed is not None:
                raise call.not_allowed
        return [result for call in self.calls for result in call.results]


def _sending(calls: Sequence[StageCall]) -> "asyncio.Future[Any]":
    return asyncio.gather(*(call.stage.send(call) for call in calls))
