"""The queue to AsyncLLM: in order, and postponed items do not wake it."""

import asyncio
from collections.abc import Iterator

import pytest

from vllm_omni_plugin.orchestrator.front_end import QueuedFrontEnd


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
