"""Calls that other heads make of the engines, as this head heeds them."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.errors import NotAllowedError, ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.engine_calls import FORGET_LORA, decode
from vllm_omni_plugin.orchestrator.peer_messages import EngineCall, EngineCallOver
from vllm_omni_plugin.orchestrator.stage_calls import StageCall, StageCalls
from vllm_omni_plugin.orchestrator.told_elsewhere import ToldElsewhere, tell

logger = init_logger(__name__)

MAX_OPEN = 1024
"""Calls under way at once that are recorded; more are refused."""

_NOT_REPEATED = frozenset({FORGET_LORA, "collective_rpc"})
"""What is not sent to engines, and what may not be done twice."""
_OF_ADAPTERS = frozenset({"add_lora", "pin_lora", "remove_lora"})
_SLEEP_CALLS = frozenset({"sleep", "wake_up"})


@dataclass(eq=False, slots=True)
class _ForeignCall:
    args: tuple[Any, ...]
    told: EngineCall
    calls: list[tuple[StageCalls, StageCall]]
    sending: "asyncio.Future[Any]"


class ForeignCalls:
    """Records what the engines were told by other heads, and tells those replicas that only this head reaches.

    Lives on the orchestrator's loop.

    Args:
        stages: this head's, by stage.
        tell_front: hands an item to AsyncLLM's side.
    """

    def __init__(self, stages: Sequence[StageCalls], tell_front: Callable[[Any], None]) -> None:
        self._stages = stages
        self._front = tell_front
        self._open: dict[tuple[str, int], _ForeignCall] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, head_id: str, told: EngineCall) -> int:
        """A head calls the engines. A call that is known already is ignored.

        Returns:
            How many replicas only this head reaches, which it calls itself.

        Raises:
            WireError: it is not such a call, or one of stages that this head does not have. Nothing has changed.
        """
        args = decode(told.method, told.arguments)
        if max(told.stages, default=0) >= len(self._stages):
            raise WireError(f"a call of stages {told.stages}: this head has {len(self._stages)}")
        if len(self._open) >= MAX_OPEN:
            raise WireError("too many calls are under way")
        key, marks = (head_id, told.call), set(told.told)
        if key not in self._open:
            stages = [self._stages[stage_id] for stage_id in told.stages]
            calls = [(stage, stage.begin(told.method, args, told=marks)) for stage in stages]
            sending = asyncio.gather(*(stage.send(call) for stage, call in calls if call.members))
            self._open[key] = _ForeignCall(args, told, calls, sending)
        return sum(len(call.members) for _, call in self._open[key].calls)

    def told(self, head_id: str, number: int) -> EngineCall | None:
        """What a head told of a call that is under way, None if nothing is known of it."""
        call = self._open.get((head_id, number))
        return None if call is None else call.told

    def over(self, head_id: str, over: EngineCallOver) -> Coroutine[Any, Any, None] | None:
        """A head's call has come to its end.

        Returns:
            What ends when this head's own replicas and AsyncLLM's side have heeded it, to be awaited; None if nothing
            is known of the call's begin.

        Raises:
            WireError: it says nothing of some of the call's stages. Nothing has changed.
        """
        call = self._open.get((head_id, over.call))
        if call is None:
            return None
        if len(over.taken) != len(call.calls):
            raise WireError(f"the end of a call of {len(call.calls)} stages speaks of {len(over.taken)}")
        del self._open[head_id, over.call]
        for (stage, own), taken in zip(call.calls, over.taken, strict=True):
            own.settle(taken)
            for member in stage.find(over.cleared):
                stage.cache_cleared(member)
            for member in stage.find(over.failed):
                stage.distrust(member, own.method)
        return self._end(call, over)

    async def _end(self, call: _ForeignCall, over: EngineCallOver) -> None:
        await call.sending
        for (stage, own), taken in zip(call.calls, over.taken, strict=True):
            _distrust_the_different(stage, own, taken)
        await self._tell_front(call, any(over.taken))

    async def abandon(self, head_ids: Sequence[str] | None) -> bool:
        """Heads are gone in the middle of their calls, so nobody knows whose engines have been told.

        Such a call is made again, by each head that recorded it: all calls but updates of weights may be made twice.
        One that others have followed is not, lest it undo them, unless it is about an adapter.

        Args:
            head_ids: which; None: they are only out of reach, and go on with what they do.

        Returns:
            Whether there were any such calls.
        """
        return await self._give_up(
            [key for key in self._open if head_ids is None or key[0] in head_ids], head_ids is not None
        )

    async def compare(self, head_id: str, under_way: Collection[int]) -> bool:
        """A head says which of its calls are under way; this one may have missed the end of others. As `abandon`."""
        return await self._give_up([key for key in self._open if key[0] == head_id and key[1] not in under_way], True)

    async def _give_up(self, keys: Sequence[tuple[str, int]], repeat: bool) -> bool:
        for call in [self._open.pop(key) for key in keys]:
            await call.sending
            method, last = call.told.method, all(stage.is_last(own) for stage, own in call.calls)
            if repeat and method not in _NOT_REPEATED and (last or method in _OF_ADAPTERS):
                await self._make_again(call)
            else:
                for _, own in call.calls:
                    own.settle(True)
                await self._tell_front(call, True)
        return bool(keys)

    def forget(self) -> None:
        """The record that was adopted has what is under way, or had never heard of it."""
        self._open.clear()

    def close(self) -> None:
        """Stop calling."""
        for call in self._open.values():
            call.sending.cancel()
        self._open.clear()

    async def _make_again(self, call: _ForeignCall) -> None:
        logger.warning("A head was lost during its call %s: it is made again.", call.told.method)
        again = [(stage, StageCall(own.method, own.args, stage.members, own.settle)) for stage, own in call.calls]
        await asyncio.gather(*(stage.send(own) for stage, own in again))
        taken = any(own.results for _, own in again)
        for stage, own in again:
            own.settle(bool(own.results) if own.members else taken)
            stage.distrust_the_failed(own)
        await self._tell_front(call, taken)

    async def _tell_front(self, call: _ForeignCall, taken: bool) -> None:
        method, (stage, _) = call.told.method, call.calls[0]
        if not taken:
            return
        news = ToldElsewhere(
            call.args if method == "add_lora" else (),
            call.args if method == FORGET_LORA else (),
            stage.shared.sleep_level if method in _SLEEP_CALLS else None,
            Future(),
        )
        if news.loaded or news.unloaded or news.sleep_level is not None:
            await tell(self._front, news)


def _distrust_the_different(stage: StageCalls, call: StageCall, taken: bool) -> None:
    """Take out those of this head's replicas that did otherwise than the caller's."""
    for member, answer in zip(call.members, call.answers, strict=True):
        if isinstance(answer, ReplicaError) is taken and not isinstance(answer, NotAllowedError):
            stage.distrust(member, call.method)
