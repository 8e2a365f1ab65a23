"""The rate at which a head moves requests of lost replicas."""

from collections.abc import Callable

MOVES_PER_S = 256.0
"""Moves per second in the long run. Each computes a prompt again, which slows down all other requests there."""
MOVES_AT_ONCE = 1024
"""Moves that may follow each other after a quiet time: what several replicas have in flight."""


class MoveBudget:
    """Limits the moves per second of a head: a token bucket."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moves = float(MOVES_AT_ONCE)
        self._counted_at = clock()

    @property
    def has_one(self) -> bool:
        """Whether a request may move now; moves are refilled at `MOVES_PER_S`, up to `MOVES_AT_ONCE`."""
        now = self._clock()
        self._moves = min(MOVES_AT_ONCE, self._moves + (now - self._counted_at) * MOVES_PER_S)
        self._counted_at = now
        return self._moves >= 1.0

    def spend(self) -> None:
        self._moves -= 1.0

    @property
    def next_at(self) -> float:
        """Monotonic seconds at which there is a move again."""
        return self._counted_at + max(0.0, 1.0 - self._moves) / MOVES_PER_S
