"""Heads with real seats at a real coordinator agree on what they were told, also over its death."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.fakes.conditions import eventually
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_peer_calls import PAUSED, STORY
from vllm_omni_plugin.coordinator import OmniCoordClientForHead, OmniCoordinator
from vllm_omni_plugin.orchestrator.seat_listener import SeatListener
from vllm_omni_plugin.orchestrator.work_exchange import WorkExchange


class SeatedHead(FakeHead):
    """A head whose link is `OmniCoordClientForHead`."""

    def __init__(self, head_id: str, coordinator: str, replicas: int = 2) -> None:
        super().__init__(HeadBus(), head_id, replicas)
        self.orchestrator.exchange = WorkExchange([self.pool], lambda work, full: None)
        listener = SeatListener(self.orchestrator.rpc_async_queue)
        self.client = OmniCoordClientForHead(coordinator, head_id, listener)
        self.seat = self.client  # type: ignore[assignment]

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.close)
        await super().__aexit__()


@pytest.fixture
def coordinator() -> OmniCoordinator:
    return OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")


async def seated(stack: AsyncExitStack, head_id: str, coordinator: OmniCoordinator) -> SeatedHead:
    head = await stack.enter_async_context(SeatedHead(head_id, coordinator.router_zmq_addr))
    async with asyncio.timeout(10):
        await head.peers.synchronised()
    return head


async def test_what_one_head_is_told_holds_for_all_and_for_those_that_come_later(
    stack: AsyncExitStack, coordinator: OmniCoordinator
) -> None:
    stack.callback(coordinator.close)
    first, second = [await seated(stack, head_id, coordinator) for head_id in "ab"]
    await first.call("pause_scheduler", "keep", True)
    assert second.replay == PAUSED
    await second.call("add_lora", STORY)
    assert first.adapters == {"story": STORY}
    await second.manage("drain", 1)
    late = await seated(stack, "c", coordinator)
    assert late.replay == first.replay
    assert late.adapters == {"story": STORY}
    assert [head.pool.member(1).held_back for head in (first, second, late)] == [{"admin"}] * 3


async def test_heads_are_told_after_the_coordinators_death_what_they_missed(
    stack: AsyncExitStack, coordinator: OmniCoordinator
) -> None:
    first, second = [await seated(stack, head_id, coordinator) for head_id in "ab"]
    address, pub = coordinator.router_zmq_addr, coordinator.pub_zmq_addr
    await asyncio.to_thread(coordinator.close)
    await first.call("pause_scheduler", "keep", True)
    again = await asyncio.to_thread(OmniCoordinator, address, pub)
    stack.callback(again.close)
    await second.until(PAUSED)
    await second.call("resume_scheduler")
    await eventually(lambda: first.replay == [])
