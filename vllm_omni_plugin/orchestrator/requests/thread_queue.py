"""A queue from any thread to one event loop."""

import asyncio
import threading
from contextlib import suppress
from typing import Generic, TypeVar

from vllm_omni_plugin.errors import OmniError

T = TypeVar("T")


class QueueClosedError(OmniError):
    """The queue's owner has closed it; its items are dropped."""


class ThreadQueue(Generic[T]):
    """Passes items from any thread to the one event loop that takes them, in order.

    The first item wakes the consumer, which takes all items at once, so a burst is one wake-up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[T] = []
        # The consumer's loop, and the event that it waits for.
        self._consumer: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item, from any thread. Raises QueueClosedError."""
        with self._lock:
            if self._closed:
                raise QueueClosedError("the queue is closed")
            self._items.append(item)
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            _wake(*consumer)

    async def get_batch(self) -> list[T]:
        """Wait for at least one item and take all there are. One consumer at a time. Raises QueueClosedError."""
        while True:
            with self._lock:
                if self._closed:
                    raise QueueClosedError("the queue is closed")
                if self._items:
                    batch, self._items = self._items, []
                    return batch
                added = asyncio.Event()
                self._consumer = (asyncio.get_running_loop(), added)
            await added.wait()

    def close(self) -> list[T]:
        """Wake the consumer if it waits. Idempotent, from any thread. Returns the items that were queued."""
        with self._lock:
            self._closed = True
            dropped, self._items = self._items, []
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            _wake(*consumer)
        return dropped


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # The loop may have ended.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)
