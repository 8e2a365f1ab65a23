"""Draining: heads finish in time, or are told when time is over."""

import asyncio
import threading

import pytest

from tests.fakes.conditions import eventually
from tests.replicas.server.conftest import Node, StartNode
from tests.replicas.server.heads import Head
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.replicas.control.lease_messages import AttachRefused
from vllm_omni_plugin.replicas.replica_server import replica_server


async def test_a_draining_replica_waits_for_its_head_and_refuses_others(node: Node) -> None:
    async with node.attached() as head, node.head() as late:
        info = await node.up()
        node.server.drain()
        assert (await head.next_status()).status is ReplicaStatus.DRAINING
        await eventually(lambda: node.info is None)
        assert [row.status for row in node.coordinator.get_active_replicas().no_new_work] == [ReplicaStatus.DRAINING]
        answer = await late.try_attach(info.incarnation)
        assert isinstance(answer, AttachRefused)
        assert "draining" in answer.reason
        node.engine.send_tokens(0, "the last one")
        assert await head.read_ids(1) == ["the last one"]
        await head.detach()
        await node.running
    assert node.engine.process.ended
    await eventually(lambda: node.coordinator.get_active_replicas().no_new_work == [])


async def test_a_drain_timeout_notifies_the_heads_and_stops(start_node: StartNode) -> None:
    node = await start_node(drain_timeout=0.1)
    async with node.attached() as head:
        node.server.drain()
        assert (await head.next_status()).status is ReplicaStatus.DRAINING
        status = await head.next_status()
        assert status.status is ReplicaStatus.DOWN
        assert status.reason == "its drain timeout of 0.1 s passed"
        await head.detach()
        await node.running
    assert node.engine.process.ended


async def test_a_head_that_does_not_detach_does_not_prevent_the_stop(head: Head, node: Node) -> None:
    node.server.stop_now("it was told twice")
    assert (await head.next_status()).reason == "it was told twice"
    await node.running


async def test_an_idle_replica_stops_at_once_and_a_later_drain_or_stop_has_no_effect(node: Node) -> None:
    await node.up()
    node.server.drain()
    node.server.drain()
    await node.running
    assert node.engine.process.shutdowns == [None]
    node.server.drain()
    node.server.stop_now("once more")
    assert len(node.launcher.engines) == 1


@pytest.mark.parametrize(("leave", "why"), [("drain", "draining: it is draining"), ("stop_now", "down: it was told")])
async def test_a_head_that_attaches_during_the_stop_is_refused_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch, leave: str, why: str
) -> None:
    info = await node.up()
    may_end, process = threading.Event(), node.engine.process

    def shutdown(timeout: float | None = None) -> None:
        assert may_end.wait(10)
        process.die()

    monkeypatch.setattr(process, "shutdown", shutdown)
    async with node.head() as late:
        if leave == "drain":
            node.server.drain()
        else:
            node.server.stop_now("it was told")
        answer = await late.try_attach(info.incarnation)
        may_end.set()
        assert isinstance(answer, AttachRefused)
        assert why in answer.reason
        await node.running


async def test_a_drain_request_after_a_lost_data_connection_is_handled(head: Head, node: Node) -> None:
    node.engine.send_tokens(0, "a")
    await head.read_ids(1)
    head.outputs.close(linger=0)
    assert (await head.next_status()).status is ReplicaStatus.ERROR
    await head.request_drain()
    await node.running


@pytest.mark.parametrize("leave", ["drain", "disable_restarts"])
async def test_a_draining_replica_stops_at_once_if_its_engine_hangs(start_node: StartNode, leave: str) -> None:
    node = await start_node(heartbeat_timeout=0.2)
    await node.up()
    node.engine.hang()
    await eventually(lambda: node.info is None)
    getattr(node.server, leave)()
    await asyncio.wait_for(node.running, 10)


async def test_draining_before_the_engine_is_ready_cancels_its_start(node: Node) -> None:
    node.server.drain()
    await node.running
    assert all(engine.process.ended for engine in node.launcher.engines)
    assert not node.server.ready.is_set()


@pytest.mark.parametrize("leave", ["drain", "disable_restarts"])
async def test_an_engine_that_dies_during_a_drain_is_not_restarted(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    monkeypatch.setattr(replica_server, "LINGER_S", 5.0)
    node = await start_node()
    async with node.attached() as head:
        getattr(node.server, leave)()
        if leave == "drain":
            assert (await head.next_status()).status is ReplicaStatus.DRAINING
        assert not node.running.done(), "the engine still serves"
        node.engine.process.die()
        assert (await head.next_status()).status is ReplicaStatus.ERROR
        await asyncio.wait_for(node.running, 10)
    assert len(node.launcher.engines) == 1
