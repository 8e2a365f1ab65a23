"""Bounded one-way queues between the event loops of two threads."""

import asyncio
import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

from vllm_omni_plugin.errors import OmniError

T = TypeVar("T")


class HandoverClosedError(OmniError):
    """The queue's owner has closed it; what was in it is gone."""


class HandoverQueue(Generic[T]):
    """Hands items from any thread to the one event loop that takes them, in order.

    An idle queue costs nothing: the consumer sleeps in its loop until the first item wakes it, and takes all that has
    come by then, so a burst is one wake-up. Producers that find the queue full wait in their own loops.

    Args:
        maxsize: items held before `put` waits. `force_put` exceeds it, for items whose number is bounded elsewhere.
    """

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize must be positive, got {maxsize}")
        self._maxsize = maxsize
        self._lock = threading.Lock()
        self._items: deque[T] = deque()
        self._consumer: _Waiter | None = None
        self._producers: list[_Waiter] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether `put` would wait."""
        return len(self._items) >= self._maxsize

    def force_put(self, item: T) -> None:
        """Add an item whatever the length, from any thread; never waits.

        Raises:
            HandoverClosedError: the queue is closed.
        """
        with self._lock:
            self._require_open()
            self._items.append(item)
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.wake()

    async def put(self, item: T) -> None:
        """Add an item, waiting in the caller's loop while the queue is full.

        Raises:
            HandoverClosedError: the queue is or becomes closed.
        """
        await self.wait_for_room()
        self.force_put(item)

    async def wait_for_room(self) -> None:
        """Return once the queue is not full. Raises HandoverClosedError as `put` does."""
        while True:
            with self._lock:
                self._require_open()
                if len(self._items) < self._maxsize:
                    return
                waiter = _Waiter()
                self._producers.append(waiter)
            await waiter.future

    async def get_batch(self) -> list[T]:
        """Wait for at least one item and take all there are. One consumer at a time.

        Raises:
            HandoverClosedError: the queue is or becomes closed.
        """
        while True:
            with self._lock:
                self._require_open()
                if self._items:
                    batch = list(self._items)
                    self._items.clear()
                    producers, self._producers = self._producers, []
                    break
                waiter = self._consumer = _Waiter()
            await waiter.future
        for producer in producers:
            producer.wake()
        return batch

    def close(self) -> list[T]:
        """Release everybody who waits, with HandoverClosedError. Idempotent, any thread. Returns what was queued."""
        with self._lock:
            self._closed = True
            dropped = list(self._items)
            self._items.clear()
            waiters = [*self._producers, *([self._consumer] if self._consumer else [])]
            self._producers, self._consumer = [], None
        for waiter in waiters:
            waiter.wake()
        return dropped

    def _require_open(self) -> None:
        if self._closed:
            raise HandoverClosedError("the queue is closed")


class _Waiter:
    """A future of the running loop that other threads may complete."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        # A loop that has ended waits for nothing; it may end between a look at it and the call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._complete)

    def _complete(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
