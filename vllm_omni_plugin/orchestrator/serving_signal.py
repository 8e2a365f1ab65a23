"""Wakes those who wait until the fleet can serve."""

import asyncio
import threading
from collections.abc import Callable

from vllm_omni_plugin.other_loop import call_on


class ServingSignal:
    """Wakes coroutines, on any loop, when the fleet can serve. Any thread may call `can_serve`."""

    def __init__(self, can_serve: Callable[[], bool]) -> None:
        self._can_serve = can_serve
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    async def wait(self) -> None:
        """Return once the fleet can serve."""
        changed = asyncio.Event()
        waiter = (asyncio.get_running_loop(), changed)
        with self._lock:
            self._waiting.add(waiter)
        try:
            while not self._can_serve():
                await changed.wait()
                changed.clear()
        finally:
            with self._lock:
                self._waiting.discard(waiter)

    def notify(self) -> None:
        """A replica has begun to serve: wake all who wait."""
        with self._lock:
            for loop, changed in self._waiting:
                call_on(loop, changed.set)
