"""Waiting, on any thread's event loop, until the fleet can serve."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


class ServingSignal:
    """Wakes coroutines when the fleet can serve. Nothing is polled.

    Args:
        can_serve: whether it can; safe to call from any thread.
    """

    def __init__(self, can_serve: Callable[[], bool]) -> None:
        self._can_serve = can_serve
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    async def wait(self) -> None:
        """Return once the fleet can serve."""
        news = asyncio.Event()
        place = (asyncio.get_running_loop(), news)
        with self._lock:
            self._waiting.add(place)
        try:
            while not self._can_serve():
                await news.wait()
                news.clear()
        finally:
            with self._lock:
                self._waiting.discard(place)

    def tell(self) -> None:
        """A replica has begun to take requests."""
        with self._lock:
            for loop, news in self._waiting:
                # A loop that has ended waits for nothing, and the others are to be told all the same.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(news.set)
