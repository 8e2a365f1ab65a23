"""Whether an engine's own loop still answers, of which the existence of its process says nothing."""

import asyncio
from collections.abc import Awaitable, Callable

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine.running_engine import Engine

_LONG_STEPS = 4.0
"""How many times the longest answer seen an engine may take: it answers between steps only, and steps differ."""
_FADE = 0.99
"""What is left of the longest answer with each later one, or one compilation would hide every hang from then on."""
_LONG_CALL_S = 300.0
"""What an engine may take for a long call that it was sent before, in which it answers nothing."""


class Probe:
    """Asks an engine at intervals, once at a time, and says when it hangs and when it is back.

    Args:
        engine: is asked by `StageClient.answers`.
        interval: seconds between an answer and the next question.
        timeout: seconds an answer may take, unless answers that took long were seen; see `limit`.
        on_hang: called with the reason when an answer is overdue.
        on_answer: awaited when an overdue answer has come after all, before the next question.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        interval: float,
        timeout: float,
        on_hang: Callable[[str], None],
        on_answer: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._client = engine.client
        self._interval = interval
        self._timeout = timeout
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._clock = clock
        self._longest = 0.0
        # Whether the time of the answer that is awaited says something of the engine's steps.
        self._is_fair = True

    @property
    def limit(self) -> float:
        """Seconds after which a question that is not answered means a hang.

        An answer that came later than that counts as one that took so long: what looked like a hang may have been one
        of many long steps, and then requests would move from one engine to the next and end nowhere.
        """
        return max(self._timeout, _LONG_STEPS * self._longest)

    async def run(self) -> str:
        """Probe until the engine is lost; returns the reason. An engine that fails the question is given up."""
        lost = self._engine.lost
        while not lost.done():
            await asyncio.wait({lost}, timeout=self._interval)
            if not lost.done():
                try:
                    await self._ask()
                except ReplicaError as error:
                    self._engine.give_up(f"its engine cannot be probed: {error}")
        return lost.result()

    async def _ask(self) -> None:
        asked_at, limit, is_busy = self._clock(), self.limit, self._client.is_busy
        patience = max(limit, _LONG_CALL_S) if is_busy else limit
        self._is_fair = not is_busy
        answer = asyncio.ensure_future(self._client.answers())
        try:
            is_overdue = not await self._comes(answer, patience)
            if is_overdue:
                self._on_hang(f"its engine has not answered for {patience:.1f} s")
            await answer
            self._client.heard_at = self._clock()
        finally:
            answer.cancel()
        self._longest *= _FADE
        if self._is_fair:
            self._longest = max(self._longest, min(self._clock() - asked_at, limit))
        if is_overdue:
            await self._on_answer()

    async def _comes(self, answer: "asyncio.Future[None]", patience: float) -> bool:
        """Whether the answer comes in time. Time in which this process could not have read it does not count."""
        while True:
            waits_from = self._clock()
            answered, _ = await asyncio.wait({answer}, timeout=patience)
            if answered:
                return True
            late_by = self._clock() - waits_from - patience
            if self._client.is_read and late_by <= self._interval:
                return False
            self._is_fair = False
