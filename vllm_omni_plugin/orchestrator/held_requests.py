"""Requests that wait, in order, for a replica that serves."""

import asyncio
from collections.abc import Callable, Iterator

from vllm_omni_plugin.orchestrator.stage_run import StageRun

MAX_HELD_REQUESTS = 4096
"""Requests that may wait at once. Those beyond are refused at once: after a gap they would only be late."""


class HeldRequests:
    """A bounded waiting line. All wait equally long at most, so one timer, for the first, does for all of them.

    Args:
        wait: seconds a request may wait; with 0, none does.
        clock: monotonic seconds.
        on_expired: called on the loop with each request that has waited in vain and has left the line.
    """

    def __init__(self, wait: float, clock: Callable[[], float], on_expired: Callable[[StageRun], None]) -> None:
        self.wait = wait
        self._clock = clock
        self._on_expired = on_expired
        # In order of arrival and so of their deadlines.
        self._line: dict[str, StageRun] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._line)

    def hold(self, run: StageRun) -> bool:
        """Put a request at the end of the line. Returns False if it may not wait."""
        if self.wait <= 0 or len(self._line) >= MAX_HELD_REQUESTS:
            return False
        run.waits_since = self._clock()
        self._line[run.request_id] = run
        self._set_timer()
        return True

    def remove(self, run: StageRun) -> bool:
        """A request no longer waits. Returns whether it did."""
        return self._line.pop(run.request_id, None) is not None

    def take(self) -> StageRun | None:
        """Remove and return the first in the line, None if there is nobody."""
        first = next(iter(self._line), None)
        return None if first is None else self._line.pop(first)

    def close(self) -> None:
        """Stop the timer for good. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        first = next(iter(self._line.values()), None)
        if self._timer is None and first is not None and not self._closed:
            rest = max(0.0, first.waits_since + self.wait - self._clock())
            self._timer = asyncio.get_running_loop().call_later(rest, self._expire)

    def _expire(self) -> None:
        self._timer = None
        try:
            for run in list(self._overdue()):
                self.remove(run)
                self._on_expired(run)
        finally:
            self._set_timer()

    def _overdue(self) -> Iterator[StageRun]:
        now = self._clock()
        for run in self._line.values():
            if run.waits_since + self.wait > now:
                return
            yield run
