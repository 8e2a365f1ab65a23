"""A call that this head makes of the engines, as the other heads are told of it."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from vllm_omni_plugin.orchestrator.fleet_record import RecordKeeper
from vllm_omni_plugin.orchestrator.peer_asking import ANSWER_S, PeerAsking
from vllm_omni_plugin.orchestrator.peer_messages import (
    ENGINE_CALL,
    ENGINE_CALL_OVER,
    EngineCall,
    EngineCallOver,
    mark_of,
)
from vllm_omni_plugin.orchestrator.stage_calls import StageCall

HEED_S = 300.0
"""Seconds that other heads have for replicas that only they reach, such as those of their own process."""


class OwnCall:
    """Satisfies `SharedCall`.

    Args:
        message: what the others are told first.
        asking: the way to them.
        record: knows how far this head is.
        spawn: runs what nobody waits for.
        ended: called with its number, once, when it has come to its end.
    """

    def __init__(
        self,
        message: EngineCall,
        asking: PeerAsking,
        record: RecordKeeper,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        ended: Callable[[int], None],
    ) -> None:
        self._message = message
        self._asking = asking
        self._record = record
        self._spawn = spawn
        self._ended = ended
        self._timeout = ANSWER_S

    async def heard(self) -> None:
        """See `SharedCall`."""
        for answer in await self._asking.tell(ENGINE_CALL, self._message):
            if not answer.error and answer.result:
                self._timeout = HEED_S

    async def over(self, taken: list[bool], calls: Sequence[StageCall]) -> None:
        """See `SharedCall`."""
        failed = [mark_of(member) for call, took in zip(calls, taken, strict=True) if took for member in call.failed]
        cleared = [mark_of(member) for call in calls for member in call.cleared]
        await self._tell_end(taken, failed, cleared)

    def withdraw(self) -> None:
        """See `SharedCall`."""
        self._spawn(self._tell_end([False] * len(self._message.stages), [], []))

    async def _tell_end(self, taken: list[bool], failed: list[int], cleared: list[int]) -> None:
        after = self._record.advance() if self._message.after is not None else None
        message = EngineCallOver(self._message.call, after, taken, failed, cleared)
        self._ended(self._message.call)
        await self._asking.tell(ENGINE_CALL_OVER, message, self._timeout)
