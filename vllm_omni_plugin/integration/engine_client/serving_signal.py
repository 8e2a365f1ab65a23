"""Waiting, on AsyncLLM's event loop, until the fleet can serve."""

import asyncio
import threading
from contextlib import suppress

from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator


class ServingSignal:
    """Wakes coroutines when the fleet can serve. Nothing is polled.

    Args:
        orchestrator: its loop, on another thread, tells of every replica that begins to take requests.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        orchestrator.on_serving = self._wake

    async def wait(self) -> None:
        """Return once the fleet can serve."""
        news = asyncio.Event()
        place = (asyncio.get_running_loop(), news)
        with self._lock:
            self._waiting.add(place)
        try:
            while not self._orchestrator.can_serve:
                await news.wait()
                news.clear()
        finally:
            with self._lock:
                self._waiting.discard(place)

    def _wake(self) -> None:
        with self._lock:
            for loop, news in self._waiting:
                # A loop that has ended waits for nothing, and the others are to be told all the same.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(news.set)
