"""A queue with one time limit for all, and the rate at which requests of lost replicas move."""

from collections.abc import Callable, Iterator

from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

MAX_HELD_REQUESTS = 4096
"""Requests that may be held at once. More would only be late after the gap, so they are refused at once."""
MOVES_PER_S = 256.0
"""Moves per second in the long run. Each computes a prompt again, which slows down all other requests there."""
MOVES_AT_ONCE = 1024
"""Moves that may follow each other after a quiet time: what several replicas have in flight."""


class HoldQueue:
    """A bounded queue of runs. All wait equally long at most, so the first is the first whose time is over.

    Args:
        wait: seconds a run may wait; with 0, none does.
        wake_at: asks for a call of `take_overdue` at this time, in monotonic seconds.
    """

    def __init__(self, wait: float, wake_at: Callable[[float], None]) -> None:
        self.wait = wait
        self._wake_at = wake_at
        self._runs: dict[StageRun, None] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[StageRun]:
        return iter(self._runs)

    def hold(self, run: StageRun, now: float) -> bool:
        """Put a run at the end of the queue. Returns False if it may not wait."""
        if self.wait <= 0 or len(self._runs) >= MAX_HELD_REQUESTS:
            return False
        run.waiting_since = now
        self._runs[run] = None
        if len(self._runs) == 1:
            self._wake_at(now + self.wait)
        return True

    def remove(self, run: StageRun) -> None:
        self._runs.pop(run, None)

    def take_overdue(self, now: float) -> StageRun | None:
        """Remove and return the first run if its time is over."""
        first = next(iter(self._runs), None)
        if first is None:
            return None
        due = first.waiting_since + self.wait
        if due > now:
            self._wake_at(due)
            return None
        del self._runs[first]
        return first


class MoveBudget:
    """Limits the moves per second of a head: a token bucket."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moves = float(MOVES_AT_ONCE)
        self._counted_at = clock()

    def spend(self) -> bool:
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
