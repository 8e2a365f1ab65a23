"""Whether an engine's own loop still answers, of which the existence of its process says nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

_LONG_STEPS = 4.0
"""How many times the longest answer seen an engine may take: it answers between steps only, and steps differ."""
_FADE = 0.99
"""What is left of the longest answer with each later one, or one compilation would hide every hang from then on."""


class Probe:
    """Calls the engine at intervals, one call at a time, and says when it hangs and when it is back.

    Args:
        call: calls the engine; raises `ReplicaError` when it is dead.
        interval: seconds between an answer and the next call.
        timeout: seconds an answer may take, unless answers that took long were seen; see `limit`.
        on_hang: called with the reason when an answer is overdue.
        on_answer: called when an overdue answer has come after all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        call: Callable[[], Awaitable[Any]],
        interval: float,
        timeout: float,
        on_hang: Callable[[str], None],
        on_answer: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._call = call
        self._interval = interval
        self._timeout = timeout
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._clock = clock
        self._longest = 0.0

    @property
    def limit(self) -> float:
        """Seconds after which a call that is not answered means a hang."""
        return max(self._timeout, _LONG_STEPS * self._longest)

    async def run(self) -> None:
        """Probe until cancelled. Raises `ReplicaError` when the engine is dead."""
        while True:
            asked_at = self._clock()
            answer = asyncio.ensure_future(self._call())
            try:
                answered, _ = await asyncio.wait({answer}, timeout=self.limit)
                if answered:
                    await answer
                    self._longest = max(_FADE * self._longest, self._clock() - asked_at)
                else:
                    self._on_hang(f"its engine has not answered for {self.limit:.1f} s")
                    await answer
                    self._on_answer()
            finally:
                answer.cancel()
            await asyncio.sleep(self._interval)
