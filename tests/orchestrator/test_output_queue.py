"""The queue to AsyncLLM: in order, and postponed items do not wake it."""

import asyncio
from collections.abc import Iterator
from math import inf

import pytest

from vllm_omni_plugin.orchestrator.pool.output_queue import OutputQueue


@pytest.fixture
def queue() -> Iterator[OutputQueue]:
    queue = OutputQueue(10, inf, [])
    yield queue
    queue.stop_waiting()


async def test_a_postponed_item_goes_before_the_next_item(queue: OutputQueue) -> None:
    queue.give_later("first")
    queue.give_later("second")
    assert len(queue) == 0
    queue.give("third")
    assert await queue.get_batch() == ["first", "second", "third"]
    queue.give("fourth")
    assert await queue.get_batch() == ["fourth"]


async def test_a_postponed_item_goes_alone_after_a_while(queue: OutputQueue) -> None:
    for number in ("one", "two"):
        queue.give_later(number)
        async with asyncio.timeout(10):
            assert await queue.get_batch() == [number]


async def test_a_postponed_item_is_dropped_with_a_closed_queue(queue: OutputQueue) -> None:
    queue.give_later("first")
    queue.close()
    queue.give("second")
    assert len(queue) == 0
