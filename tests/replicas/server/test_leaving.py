"""Draining: heads finish in time, or are told when time is over."""

import asyncio
import threading

import pytest

from tests.fakes.conditions import eventually
from tests.replicas.server.conftest import Node, StartNode
from tests.replicas.server.heads import Head
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.replicas.control.lease_messages import AttachRefused
from vllm_omni_plugin.replicas.server import replica_server


async def test_a_drained_replica_waits_for_its_head_and_takes_no_other(node: Node) -> None:
    async with node.attached() as head, node.head() as late:
        info = await node.up()
        node.server.drain()
        assert (await head.hear_status()).status is ReplicaStatus.DRAINING
        await eventually(lambda: node.info is None)
        assert [row.status for row in node.coordinator.get_active_replicas().no_new_work] == [ReplicaStatus.DRAINING]
        answer = await late.ask_to_attach(info.incarnation)
        assert isinstance(answer, AttachRefused)
        assert "draining" in answer.reason
        node.engine.say(0, "the last one")
        assert await head.read_ids(1) == ["the last one"]
        await head.detach()
        await node.running
    assert node.engine.process.ended
    await eventually(lambda: node.coordinator.get_active_replicas().no_new_work == [])


async def test_a_drain_out_of_time_tells_the_heads_and_ends(start_node: StartNode) -> None:
    node = await start_node(drain_timeout=0.1)
    async with node.attached() as head:
        node.server.drain()
        assert (await head.hear_status()).status is ReplicaStatus.DRAINING
        status = await head.hear_status()
        assert status.status is ReplicaStatus.DOWN
        assert status.reason == "its drain timeout of 0.1 s passed"
        await head.detach()
        await node.running
    assert node.engine.process.ended


async def test_a_head_that_does_not_detach_cannot_keep_a_replica(head: Head, node: Node) -> None:
    node.server.stop_now("it was told twice")
    assert (await head.hear_status()).reason == "it was told twice"
    await node.running


async def test_an_idle_replica_leaves_at_once_and_its_engine_has_time_to_end(node: Node) -> None:
    await node.up()
    node.server.drain()
    await node.running
    assert node.engine.process.shutdowns == [None]


@pytest.mark.parametrize(("leave", "why"), [("drain", "draining: it is draining"), ("stop_now", "down: it was told")])
async def test_a_head_that_comes_while_an_idle_replica_leaves_is_told_so(
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
        answer = await late.ask_to_attach(info.incarnation)
        may_end.set()
        assert isinstance(answer, AttachRefused)
        assert why in answer.reason
        await node.running


async def test_leaving_again_after_the_end_changes_nothing(node: Node) -> None:
    await node.up()
    node.server.drain()
    node.server.drain()
    await node.running
    node.server.drain()
    node.server.stop_now("once more")
    assert len(node.launcher.engines) == 1


async def test_a_head_may_ask_a_replica_to_leave(head: Head, node: Node) -> None:
    await head.leave()
    assert (await head.hear_status()).status is ReplicaStatus.DRAINING
    await head.detach()
    await node.running


async def test_a_head_that_lets_go_at_once_is_still_heard(head: Head, node: Node) -> None:
    node.engine.say(0, "a")
    await head.read_ids(1)
    head.outputs.close(linger=0)
    assert (await head.hear_status()).status is ReplicaStatus.ERROR
    await head.leave()
    await node.running


@pytest.mark.parametrize("leave", ["drain", "disable_restarts"])
async def test_a_replica_that_is_to_leave_ends_at_once_if_its_engine_hangs(start_node: StartNode, leave: str) -> None:
    node = await start_node(heartbeat_timeout=0.2)
    await node.up()
    node.engine.hang()
    await eventually(lambda: node.info is None)
    getattr(node.server, leave)()
    await asyncio.wait_for(node.running, 10)


async def test_draining_before_the_engine_is_ready_gives_up_its_start(node: Node) -> None:
    node.server.drain()
    await node.running
    assert all(engine.process.ended for engine in node.launcher.engines)
    assert not node.server.ready.is_set()


@pytest.mark.parametrize("leave", ["drain", "disable_restarts"])
async def test_an_engine_that_dies_when_its_replica_is_to_leave_is_not_started_again(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    monkeypatch.setattr(replica_server, "_LINGER_S", 5.0)
    node = await start_node()
    async with node.attached() as head:
        getattr(node.server, leave)()
        if leave == "drain":
            assert (await head.hear_status()).status is ReplicaStatus.DRAINING
        assert not node.running.done(), "the engine still serves"
        node.engine.process.die()
        assert (await head.hear_status()).status is ReplicaStatus.ERROR
        await asyncio.wait_for(node.running, 10)
    assert len(node.launcher.engines) == 1
