"""Keeping something running that may end: it is started again after pauses that grow while it keeps ending."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager


class Backoff:
    """Pauses between restarts, in seconds. Each is twice the one before, since a single end is most often an accident,
    but what keeps ending must not take the machine's time from what serves.

    Args:
        first: the shortest pause.
        longest: the longest one.
        healthy_after: time in service after which the pauses begin with the first one again.
    """

    def __init__(self, first: float = 1.0, longest: float = 60.0, healthy_after: float = 60.0) -> None:
        self._first = self._next = first
        self._longest = longest
        self._healthy_after = healthy_after

    def after(self, served: float) -> float:
        """The pause after something has served for so many seconds, 0.0 if it did not start."""
        if served >= self._healthy_after:
            self._next = self._first
        pause = self._next
        self._next = min(2 * pause, self._longest)
        return pause


async def keep_running(
    start: Callable[[], AbstractAsyncContextManager[Awaitable[str]]],
    backoff: Backoff,
    clock: Callable[[], float],
    pause: Callable[[float, str | Exception], Awaitable[bool]],
    *,
    must_start: bool = True,
) -> None:
    """Start something, wait for its end, start it again: until `pause` returns False, or until cancelled.

    Args:
        start: starts it when entered, returns when it serves, and frees what is left of it when exited. The value is
            awaited for the reason of its end.
        backoff: how long to pause before each restart.
        clock: monotonic seconds.
        pause: waits so many seconds; is told the reason of the end, or the error if it did not start. Returns whether
            to start again.
        must_start: whether an error of the first start is raised, because the next start would fail like it. Every
            later error is a reason to try again, whatever it is, since nobody else would.
    """
    has_served = False
    while True:
        served = 0.0
        try:
            async with start() as end:
                has_served, served_since = True, clock()
                reason: str | Exception = await end
                served = clock() - served_since
        except Exception as error:
            # A fault in freeing what is left must not turn a cancellation into a restart.
            if (must_start and not has_served) or _is_cancelled():
                raise
            reason = error
        if not await pause(backoff.after(served), reason):
            return


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
