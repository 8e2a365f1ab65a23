"""Turns for everything else on AsyncLLM's event loop."""

import asyncio
import math
from collections.abc import Callable

_TURN_EVERY_S = 0.01


class LoopTurns:
    """Keeps a coroutine that never has to wait from keeping its loop to itself.

    Outputs are filled in from another thread: while engines are faster than AsyncLLM there are always some, and all
    else on its loop, HTTP included, would stand still. A turn for every message would be dear, because what comes for a
    request between two turns is sent to its client as one event.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due = -math.inf

    async def give(self) -> None:
        """Let everything else run, if it has not for 10 ms."""
        if self._clock() >= self._due:
            await asyncio.sleep(0)
            self._due = self._clock() + _TURN_EVERY_S
