"""Restarts a process or connection whenever it ends, with exponential backoff."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager


class Backoff:
    """Pauses between restarts in seconds: each twice the previous one, from `first` to `longest`.

    After `healthy_after` seconds in service the pauses start with `first` again.
    """

    def __init__(self, first: float = 1.0, longest: float = 60.0, healthy_after: float = 60.0) -> None:
        self._first = self._next = first
        self._longest = longest
        self._healthy_after = healthy_after

    def after(self, served: float) -> float:
        """The next pause. `served`: seconds in service, 0.0 after a failed start."""
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
    must_start: Callable[[], bool] = lambda: True,
) -> None:
    """Start, wait for the end, pause, restart: until `pause` returns False, or until cancelled.

    Args:
        start: a context manager that starts the work and frees its resources. Its value is awaited for the reason of
            the end.
        pause: sleeps for the given seconds; also gets the reason of the end, or the error of the start. Returns whether
            to restart.
        must_start: whether to raise the error of a start before any has succeeded. All other errors lead to a restart.
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
            # An error while resources are freed must not turn a cancellation into a restart.
            if _is_cancelled() or (not has_served and must_start()):
                raise
            reason = error
        if not await pause(backoff.after(served), reason):
            return
        # An error has the frames of what it ended, such as an engine with its descriptors.
        del reason


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
