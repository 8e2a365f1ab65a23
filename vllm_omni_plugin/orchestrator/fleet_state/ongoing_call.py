"""An operator call in progress: recorded, sent to the replicas of some stages, and settled by their answers."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_plugin.coordinator.protocol.call_arguments import ABORT_CLIENT_REQUESTS, FORGET_LORA, HEAD_CALLS
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCall, StageCalls
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter

_APPLY_TIMEOUT_S = 10.0
_SLEEP_CALLS = frozenset({"sleep", "wake_up"})


@dataclass(frozen=True, slots=True)
class EngineStateUpdate:
    """Another head has loaded or unloaded adapters, or has changed how deep the engines sleep.

    Attributes:
        loaded: adapters that requests can name from now on. One may replace an adapter of the same name.
        unloaded: ids of adapters that requests can no longer name.
        sleep_level: the new level, 0 while the weights are in memory; None: unchanged.
        applied: done when AsyncLLM has applied the update.
    """

    loaded: tuple[Adapter, ...]
    unloaded: tuple[int, ...]
    sleep_level: int | None
    applied: "Future[None]"


@dataclass(frozen=True, slots=True)
class AbortedElsewhere:
    """An operator has aborted requests through another head: by their clients' ids, or all without ids."""

    request_ids: Sequence[str]
    applied: "Future[None]"


ServerUpdate = EngineStateUpdate | AbortedElsewhere


async def notify_state_change(put: Callable[[Any], None], update: ServerUpdate | None) -> None:
    """Send an update to AsyncLLM; returns when it is applied, or after 10 seconds."""
    if update is not None:
        put(update)
        with suppress(TimeoutError):
            async with asyncio.timeout(_APPLY_TIMEOUT_S):
                await asyncio.wrap_future(update.applied)


@dataclass(eq=False, slots=True)
class OngoingCall:
    """A recorded call that is being sent to the replicas that this head calls.

    Attributes:
        number: the call's number in the fleet; 0 for a call that other heads do not follow.
        sending: done when all called replicas have answered or failed.
        unreached: engine keys of replicas that other heads left to this head, and that this head has lost since.
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
        called_elsewhere: Collection[int] | None = None,
        number: int = 0,
    ) -> "OngoingCall":
        """Record a call and start to send it, in one step of the loop. `called_elsewhere`: see `StageCalls.begin`."""
        calls = [stage.begin(method, args, called_elsewhere) for stage in stages]
        return cls(number, method, args, calls, _sending(calls))

    def resend(self) -> "OngoingCall":
        """Send the recorded call again, now to all replicas."""
        calls = [replace(call, members=call.stage.members, answers=[], cleared=[]) for call in self.calls]
        return OngoingCall(self.number, self.method, self.args, calls, _sending(calls))

    async def outcome(self) -> list[bool]:
        """Wait for the answers, settle the record, and take out replicas that differ from the others of their stage.

        Returns:
            For each stage, whether any engine accepted the call.
        """
        try:
            await self.sending
        except BaseException:
            self.settle(False)
            raise
        # A stage without replicas counts as the others do: its first replica must replay what they have accepted.
        anywhere = any(call.results for call in self.calls)
        accepted = [
            self.method in HEAD_CALLS or (bool(call.results) if call.members else anywhere) for call in self.calls
        ]
        for call, was_accepted in zip(self.calls, accepted, strict=True):
            call.settle(was_accepted)
            call.stage.conclude(call, was_accepted)
        return accepted

    def settle(self, accepted: bool) -> None:
        for call in self.calls:
            call.settle(accepted)

    def server_update(self) -> ServerUpdate | None:
        """What AsyncLLM must know of this call if another head made it; None: nothing."""
        if not self.calls:
            return None
        if self.method == ABORT_CLIENT_REQUESTS:
            return AbortedElsewhere(self.args[0], Future())
        method, args, shared = self.method, self.args, self.calls[0].stage.shared
        known = {adapter.lora_int_id for adapter in shared.adapters}
        loaded = args if method == "add_lora" and args[0].lora_int_id in known else ()
        unloaded = args if method in (FORGET_LORA, "remove_lora") else ()
        sleep_level = shared.sleep_level if method in _SLEEP_CALLS else None
        if not loaded and not unloaded and sleep_level is None:
            return None
        return EngineStateUpdate(loaded, unloaded, sleep_level, Future())

    def results(self) -> list[Any]:
        """The answers of the replicas that accepted the call.

        Raises:
            ReplicaError: no replica of a stage accepted it, or a node does not let heads make this call.
        """
        for call in self.calls:
            if call.refused:
                raise call.answers[0]
            if call.not_allowed is not None:
                raise call.not_allowed
        return [result for call in self.calls for result in call.results]


def _sending(calls: Sequence[StageCall]) -> "asyncio.Future[Any]":
    return asyncio.gather(*(call.stage.send(call) for call in calls))
