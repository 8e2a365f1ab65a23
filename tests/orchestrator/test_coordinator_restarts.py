"""Heads that connect to a coordinator late or again agree on the fleet's state."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from tests.fakes.conditions import eventually
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_fleet_calls import PAUSED, STORY
from vllm_omni_plugin.coordinator import OmniCoordClientForHead, OmniCoordinator, ReplicaWork, SessionLost, Welcome
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState
from vllm_omni_plugin.errors import CoordinatorUnavailableError
from vllm_omni_plugin.orchestrator import SessionListener
from vllm_omni_plugin.orchestrator.fleet_state import call_session


class ConnectedHead(FakeHead):
    """A head whose client is `OmniCoordClientForHead`."""

    def __init__(self, head_id: str, coordinator: str) -> None:
        super().__init__(HeadBus(), head_id)
        listener = SessionListener(self.orchestrator.rpc_async_queue)
        self.client = OmniCoordClientForHead(coordinator, head_id, listener)
        self.send = self.client.send  # type: ignore[method-assign]

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        self.client.report_work(work, full=full)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.close)
        await super().__aexit__()


async def connected(stack: AsyncExitStack, head_id: str, coordinator: OmniCoordinator) -> ConnectedHead:
    head = await stack.enter_async_context(ConnectedHead(head_id, coordinator.router_zmq_addr))
    await eventually(lambda: head.fleet_calls.session.refusal is None)
    await head.fleet_calls.session.wait_synced()
    return head


async def test_a_call_waits_for_the_session_of_its_head(bus: HeadBus) -> None:
    async with FakeHead(bus, "a") as head:
        reply = asyncio.wrap_future(head.ask("pause_scheduler", "keep", True))
        done, _ = await asyncio.wait([reply], timeout=0.02)
        assert not done
        await head.join_fleet()
        assert await reply == ["pause_scheduler"] * 2


async def test_a_call_of_one_head_holds_for_all_heads_and_survives_the_coordinator(stack: AsyncExitStack) -> None:
    coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    first, second = [await connected(stack, head_id, coordinator) for head_id in "ab"]
    await first.call("pause_scheduler", "keep", True)
    assert second.replay == PAUSED
    await second.call("add_lora", STORY)
    assert first.adapters == {"story": STORY}
    await second.manage("drain", 1)
    address, pub = coordinator.router_zmq_addr, coordinator.pub_zmq_addr
    await asyncio.to_thread(coordinator.close)
    await eventually(lambda: first.fleet_calls.session.refusal is not None)
    with pytest.raises(CoordinatorUnavailableError):
        await first.call("resume_scheduler")
    coordinator = await asyncio.to_thread(OmniCoordinator, address, pub)
    stack.callback(coordinator.close)
    await eventually(lambda: first.fleet_calls.session.refusal is None and second.fleet_calls.session.refusal is None)
    late = await connected(stack, "c", coordinator)
    await late.until(first.replay)
    await eventually(lambda: late.adapters == {"story": STORY})
    await late.call("resume_scheduler")
    assert first.replay == second.replay == [("add_lora", (STORY,))]
    assert [head.pool.member(1).cordons for head in (first, second, late)] == [{"admin"}] * 3


async def test_an_attaching_replica_waits_until_its_head_is_synced_again(heads: list[FakeHead]) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    heads[1].fleet_calls.handle(SessionLost())
    heads[1].fleet_calls.handle(Welcome(["a", "c"]))
    attaching = asyncio.create_task(heads[1].bring_up(2))
    await asyncio.wait([attaching], timeout=0.02)
    assert not attaching.done()
    heads[1].fleet_calls.handle(FleetState(2, "a"))
    assert await attaching == []


async def test_a_head_that_loses_the_coordinator_before_its_first_state_does_not_wait(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_session, "FIRST_STATE_TIMEOUT_S", 600.0)
    heads[0].fleet_calls.handle(Welcome([]))
    heads[0].fleet_calls.handle(SessionLost())
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2
