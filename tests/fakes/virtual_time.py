"""An event loop whose time jumps from timer to timer."""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import TypeVar, TypeVarTuple

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs what is due, and then passes the time up to the next timer at once. For one thread, without files.

    Attributes:
        now: seconds since its beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NeverWaits(self))

    def time(self) -> float:
        """The loop's clock."""
        return self.now

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """There is one thread only."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, function: Callable[[*Ts], R], *args: *Ts
    ) -> "asyncio.Future[R]":
        """Likewise."""
        done: asyncio.Future[R] = self.create_future()
        done.set_result(function(*args))
        return done


class _NeverWaits(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let so much time pass; no file is ever ready. Raises RuntimeError if it would be for ever."""
        if timeout is None:
            raise RuntimeError("everybody waits for something that nothing will bring about")
        self._loop.now += max(0.0, timeout)
        return []
