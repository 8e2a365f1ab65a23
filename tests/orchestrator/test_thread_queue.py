"""The queue between two event loops, and the one to AsyncLLM, which postponed items do not wake."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_omni_plugin.orchestrator.front_end import QueuedFrontEnd
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue


async def blocked(awaitable: Any) -> asyncio.Task[Any]:
    """Start a task and return it once it waits."""
    task: asyncio.Task[Any] = asyncio.ensure_future(awaitable)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_burst_wakes_the_consumer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: ThreadQueue[int] = ThreadQueue()
    loop = asyncio.get_running_loop()
    wakes: list[Callable[..., object]] = []
    wake = loop.call_soon_threadsafe

    def count(callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        wakes.append(callback)
        return wake(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    consumer = await blocked(queue.get_batch())
    for item in range(5):
        queue.put(item)
    assert await consumer == [0, 1, 2, 3, 4]
    assert len(wakes) == 1


async def test_a_cancelled_consumer_loses_nothing() -> None:
    queue: ThreadQueue[int] = ThreadQueue()
    consumer = await blocked(queue.get_batch())
    queue.put(1)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert await queue.get_batch() == [1]


async def test_close_wakes_the_consumer() -> None:
    queue: ThreadQueue[int] = ThreadQueue()
    consumer = await blocked(queue.get_batch())
    queue.close()
    with pytest.raises(QueueClosedError):
        await consumer


async def test_a_closed_queue_refuses_and_has_dropped_what_was_in_it() -> None:
    queue: ThreadQueue[int] = ThreadQueue()
    queue.put(1)
    assert queue.close() == [1]
    assert queue.close() == []
    assert len(queue) == 0
    with pytest.raises(QueueClosedError):
        queue.put(2)
    with pytest.raises(QueueClosedError):
        await queue.get_batch()


async def test_another_thread_may_produce() -> None:
    queue: ThreadQueue[int] = ThreadQueue()

    def produce() -> None:
        for item in range(100):
            queue.put(item)

    thread = threading.Thread(target=produce)
    thread.start()
    taken: list[int] = []
    while len(taken) < 100:
        taken += await queue.get_batch()
    thread.join()
    assert taken == list(range(100))


@pytest.fixture
def front_end() -> Iterator[QueuedFrontEnd]:
    front_end = QueuedFrontEnd()
    yield front_end
    front_end.stop_waiting()


async def test_a_postponed_item_goes_before_the_next_item(front_end: QueuedFrontEnd) -> None:
    front_end.give_later("first")
    front_end.give_later("second")
    assert len(front_end.output_async_queue) == 0
    front_end.give("third")
    assert await front_end.output_async_queue.get_batch() == ["first", "second", "third"]
    front_end.give("fourth")
    assert await front_end.output_async_queue.get_batch() == ["fourth"]


async def test_a_postponed_item_goes_alone_after_a_while(front_end: QueuedFrontEnd) -> None:
    for number in ("one", "two"):
        front_end.give_later(number)
        async with asyncio.timeout(10):
            assert await front_end.output_async_queue.get_batch() == [number]


async def test_a_postponed_item_is_dropped_with_a_closed_queue(front_end: QueuedFrontEnd) -> None:
    front_end.give_later("first")
    front_end.close()
    front_end.give("second")
    assert len(front_end.output_async_queue) == 0
