"""Wakes those who wait until the fleet has replicas, or can serve."""

import asyncio
import threading
from collections.abc import Callable

from vllm_omni_plugin.other_loop import call_on


class ServingSignal:
    """Wakes coroutines, on any loop, when a replica has joined or may get requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds, which any thread may ask for."""
        changed = asyncio.Event()
        waiter = (asyncio.get_running_loop(), changed)
        with self._lock:
            self._waiting.add(waiter)
        try:
            while not condition():
                await changed.wait()
                changed.clear()
        finally:
            with self._lock:
                self._waiting.discard(waiter)

    def notify(self) -> None:
        """A replica has joined, or may get requests: wake all who wait."""
        with self._lock:
            for loop, changed in self._waiting:
                call_on(loop, changed.set)
