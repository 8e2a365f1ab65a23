"""The queue between two event loops."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue


async def blocked(awaitable: Any) -> asyncio.Task[Any]:
    """Start a task and return it once it waits."""
    task: asyncio.Task[Any] = asyncio.ensure_future(awaitable)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.parametrize("maxsize", [0, -1])
def test_a_queue_that_holds_nothing_is_a_value_error(maxsize: int) -> None:
    with pytest.raises(ValueError, match=f"maxsize must be positive, got {maxsize}"):
        ThreadQueue(maxsize)


async def test_a_burst_wakes_the_consumer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: ThreadQueue[int] = ThreadQueue(8)
    loop = asyncio.get_running_loop()
    wakes: list[Callable[..., object]] = []
    wake = loop.call_soon_threadsafe

    def count(callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        wakes.append(callback)
        return wake(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    consumer = await blocked(queue.get_batch())
    for item in range(5):
        queue.force_put(item)
    assert await consumer == [0, 1, 2, 3, 4]
    assert len(wakes) == 1


async def test_put_waits_while_the_queue_is_full_and_goes_on_when_it_is_taken() -> None:
    queue: ThreadQueue[int] = ThreadQueue(2)
    assert [queue.force_put(item) for item in (1, 2)] == [False, True]
    third = await blocked(queue.put(3))
    assert await queue.get_batch() == [1, 2]
    await third
    assert await queue.get_batch() == [3]


async def test_a_cancelled_consumer_loses_nothing() -> None:
    queue: ThreadQueue[int] = ThreadQueue(2)
    consumer = await blocked(queue.get_batch())
    queue.force_put(1)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert await queue.get_batch() == [1]


async def test_a_cancelled_producer_adds_nothing_and_blocks_no_other() -> None:
    queue: ThreadQueue[int] = ThreadQueue(1)
    await queue.put(1)
    given_up = await blocked(queue.put(2))
    patient = await blocked(queue.put(3))
    given_up.cancel()
    assert await queue.get_batch() == [1]
    await patient
    assert await queue.get_batch() == [3]


async def test_close_wakes_consumers_and_producers() -> None:
    empty: ThreadQueue[int] = ThreadQueue(1)
    full: ThreadQueue[int] = ThreadQueue(1)
    await full.put(1)
    waiting = [
        await blocked(empty.get_batch()),
        await blocked(full.put(2)),
        await blocked(full.put(3)),
        await blocked(full.wait_for_room()),
    ]
    empty.close()
    full.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [QueueClosedError] * 4


async def test_a_closed_queue_refuses_and_has_dropped_what_was_in_it() -> None:
    queue: ThreadQueue[int] = ThreadQueue(4)
    queue.force_put(1)
    assert queue.close() == [1]
    assert queue.close() == []
    assert len(queue) == 0
    with pytest.raises(QueueClosedError):
        queue.force_put(2)
    with pytest.raises(QueueClosedError):
        await queue.put(2)
    with pytest.raises(QueueClosedError):
        await queue.get_batch()


async def test_another_threads_loop_may_produce() -> None:
    queue: ThreadQueue[int] = ThreadQueue(3)

    async def produce() -> None:
        for item in range(100):
            await queue.put(item)

    thread = threading.Thread(target=asyncio.run, args=(produce(),))
    thread.start()
    taken: list[int] = []
    while len(taken) < 100:
        taken += await queue.get_batch()
    thread.join()
    assert taken == list(range(100))


async def test_a_queue_is_full_by_the_bytes_of_its_items_too() -> None:
    queue: ThreadQueue[str] = ThreadQueue(100, max_bytes=10)
    assert [queue.force_put(item, size) for item, size in (("a", 4), ("b", 5), ("c", 1))] == [False, False, True]
    blocked = asyncio.create_task(queue.put("d"))
    assert await queue.get_batch() == ["a", "b", "c"]
    await blocked
    assert not queue.force_put("e", 9)
