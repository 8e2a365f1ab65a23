"""A queue from any thread to one event loop, and answers from there."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.other_loop import call_on

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
        # Wakes the consumer, if it waits, on its loop.
        self._wake: Callable[[], None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item, from any thread. Raises QueueClosedError."""
        with self._lock:
            if self._closed:
                raise QueueClosedError("the queue is closed")
            self._items.append(item)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

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
                self._wake = partial(call_on, asyncio.get_running_loop(), added.set)
            await added.wait()

    def close(self) -> list[T]:
        """Wake the consumer if it waits. Idempotent, from any thread. Returns the items that were queued."""
        with self._lock:
            self._closed = True
            dropped, self._items = self._items, []
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()
        return dropped


async def result_of(reply: "Future[T]") -> T:
    """Return the reply's result, or raise its error: QueueClosedError if the orchestrator ended before it replied."""
    try:
        return await asyncio.wrap_future(reply)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise QueueClosedError("The server is about to end.") from None
