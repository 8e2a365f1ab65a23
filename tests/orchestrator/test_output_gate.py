"""The way to AsyncLLM: in order, and without waking it for what nobody waits for."""

import asyncio
from collections.abc import Iterator

import pytest

from vllm_omni_plugin.orchestrator.pool.output_gate import OutputGate
from vllm_omni_plugin.orchestrator.requests.thread_queue import ThreadQueue


@pytest.fixture
def queue() -> ThreadQueue[str]:
    return ThreadQueue(10)


@pytest.fixture
def gate(queue: ThreadQueue[str]) -> Iterator[OutputGate]:
    gate = OutputGate(queue, [])
    yield gate
    gate.close()


async def test_what_nobody_waits_for_goes_before_the_next_item(gate: OutputGate, queue: ThreadQueue[str]) -> None:
    gate.put_later("first")
    gate.put_later("second")
    assert len(queue) == 0
    gate.put("third")
    assert await queue.get_batch() == ["first", "second", "third"]
    gate.put("fourth")
    assert await queue.get_batch() == ["fourth"]


async def test_what_nobody_waits_for_goes_alone_in_the_end(gate: OutputGate, queue: ThreadQueue[str]) -> None:
    for number in ("one", "two"):
        gate.put_later(number)
        async with asyncio.timeout(10):
            assert await queue.get_batch() == [number]


async def test_what_waits_is_lost_with_a_closed_queue_and_harms_nobody(
    gate: OutputGate, queue: ThreadQueue[str]
) -> None:
    gate.put_later("first")
    queue.close()
    gate.put("second")
    assert len(queue) == 0
