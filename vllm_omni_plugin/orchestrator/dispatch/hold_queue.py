"""Requests that wait, in order, for a replica that serves; and how fast those of lost replicas go on elsewhere."""

from collections.abc import Callable, Iterator

from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

MAX_HELD_REQUESTS = 4096
"""Requests that may wait at once. Those beyond are refused at once: after a gap they would only be late."""
MOVES_PER_S = 256.0
"""Moves per second in the long run. For each a prompt is computed once more, which slows down all others there."""
MOVES_AT_ONCE = 1024
"""Moves that may follow each other at once after a quiet time: what several replicas have in flight."""


class HoldQueue:
    """A bounded waiting line. All wait equally long at most, so the first is the first to be overdue.

    Args:
        wait: seconds a request may wait; with 0, none does.
        wake_at: asks for a call of `take_overdue` at this time, in monotonic seconds.
    """

    def __init__(self, wait: float, wake_at: Callable[[float], None]) -> None:
        self.wait = wait
        self._wake_at = wake_at
        # In order of arrival and so of their deadlines.
        self._line: dict[StageRun, None] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[StageRun]:
        return iter(self._line)

    def hold(self, run: StageRun, now: float) -> bool:
        """Put a request at the end of the line. Returns False if it may not wait."""
        if self.wait <= 0 or len(self._line) >= MAX_HELD_REQUESTS:
            return False
        run.waiting_since = now
        self._line[run] = None
        if len(self._line) == 1:
            self._wake_at(now + self.wait)
        return True

    def remove(self, run: StageRun) -> None:
        """A request no longer waits, if it did."""
        self._line.pop(run, None)

    def take(self) -> StageRun | None:
        """Remove and return the first in the line, None if there is nobody."""
        first = next(iter(self._line), None)
        if first is not None:
            del self._line[first]
        return first

    def take_overdue(self, now: float) -> StageRun | None:
        """Remove and return the first in the line if it has waited in vain."""
        first = next(iter(self._line), None)
        if first is None:
            return None
        due = first.waiting_since + self.wait
        if due > now:
            self._wake_at(due)
            return None
        return self.take()


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
