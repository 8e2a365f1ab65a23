"""How fast requests of lost replicas go on elsewhere: a budget that all stages of a head share."""

from collections.abc import Callable

MOVES_PER_S = 256.0
"""Moves per second in the long run. For each a prompt is computed once more, which slows down all others there."""
MOVES_AT_ONCE = 1024
"""Moves that may follow each other at once after a quiet time: what several replicas have in flight."""


class MoveBudget:
    """A token bucket.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moves = float(MOVES_AT_ONCE)
        self._counted_at = clock()

    def take(self) -> bool:
        """Spend one move. Returns False if there is none."""
        now = self._clock()
        self._moves = min(MOVES_AT_ONCE, self._moves + (now - self._counted_at) * MOVES_PER_S)
        self._counted_at = now
        if self._moves < 1.0:
            return False
        self._moves -= 1.0
        return True

    @property
    def next_at(self) -> float:
        """Monotonic seconds at which there is a move again."""
        return self._counted_at + max(0.0, 1.0 - self._moves) / MOVES_PER_S
