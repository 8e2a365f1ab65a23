"""A bounded queue from any thread to one event loop."""

import asyncio
import threading
from collections import deque
from contextlib import suppress
from math import inf
from typing import Generic, TypeVar

from vllm_omni_plugin.errors import OmniError

T = TypeVar("T")

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Event]
"""A loop of any thread, and the event that a coroutine on it waits for."""


class QueueClosedError(OmniError):
    """The queue's owner has closed it; its items are dropped."""


class ThreadQueue(Generic[T]):
    """Passes items from any thread to the one event loop that takes them, in order.

    The first item wakes the consumer, which takes all items at once, so a burst is one wake-up. Producers wait in
    their own loops while the queue is full. All methods but `close` raise QueueClosedError if the queue is closed.

    Args:
        maxsize: items at which `put` waits. `force_put` may exceed it.
        max_bytes: likewise, the sum of the sizes that `force_put` got.
    """

    def __init__(self, maxsize: int, max_bytes: float = inf) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize must be positive, got {maxsize}")
        self._maxsize = maxsize
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._items: deque[T] = deque()
        self._consumer: _Waiter | None = None
        self._producers: list[_Waiter] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def _is_full(self) -> bool:
        return len(self._items) >= self._maxsize or self._bytes >= self._max_bytes

    def force_put(self, item: T, size: int = 0) -> bool:
        """Add an item of so many bytes, even to a full queue, from any thread; returns whether `put` would wait now."""
        with self._lock:
            if self._closed:
                raise QueueClosedError("the queue is closed")
            self._items.append(item)
            self._bytes += size
            is_full = len(self._items) >= self._maxsize or self._bytes >= self._max_bytes
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            _wake(consumer)
        return is_full

    async def put(self, item: T) -> None:
        """Add an item, waiting in the caller's loop while the queue is full."""
        if self._is_full:
            await self.wait_for_room()
        self.force_put(item)

    async def wait_for_room(self) -> None:
        """Return once the queue is not full."""
        while True:
            with self._lock:
                if self._closed:
                    raise QueueClosedError("the queue is closed")
                if not self._is_full:
                    return
                room = asyncio.Event()
                self._producers.append((asyncio.get_running_loop(), room))
            await room.wait()

    async def get_batch(self) -> list[T]:
        """Wait for at least one item and take all there are. One consumer at a time."""
        while True:
            with self._lock:
                if self._closed:
                    raise QueueClosedError("the queue is closed")
                if self._items:
                    batch = list(self._items)
                    self._items.clear()
                    self._bytes = 0
                    producers, self._producers = self._producers, []
                    break
                added = asyncio.Event()
                self._consumer = (asyncio.get_running_loop(), added)
            await added.wait()
        for producer in producers:
            _wake(producer)
        return batch

    def close(self) -> list[T]:
        """Wake everyone who waits. Idempotent, from any thread. Returns the items that were queued."""
        with self._lock:
            self._closed = True
            dropped = list(self._items)
            self._items.clear()
            waiters = [*self._producers, *([self._consumer] if self._consumer else [])]
            self._producers, self._consumer = [], None
        for waiter in waiters:
            _wake(waiter)
        return dropped


def _wake(waiter: _Waiter) -> None:
    loop, event = waiter
    # The loop may have ended.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)
