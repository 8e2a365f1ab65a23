"""The engine dies, hangs or does not start: heads are told at once, and it comes back under a new incarnation."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.conditions import eventually, repeated
from tests.fakes.told_probe import told_probes
from tests.replicas.server.conftest import Node, StartNode
from tests.replicas.server.heads import Head
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.control.lease_messages import AttachRefused, Status
from vllm_omni_plugin.replicas.engine import running_engine
from vllm_omni_plugin.replicas.engine.engine_keeper import FirstStarts
from vllm_omni_plugin.replicas.replica_server.announcer import Announcer
from vllm_omni_plugin.replicas.replica_server.attached_heads import AttachedHeads


async def test_an_engine_that_exits_is_reported_and_replaced_on_the_same_ports(head: Head, node: Node) -> None:
    before = await node.up()
    node.engine.process.die()
    status = await head.next_status()
    assert (status.status, status.engine_failed) == (ReplicaStatus.ERROR, False)
    assert "process 1000 exited" in status.reason
    after = await node.up(after=before.incarnation)
    addresses = (before.input_addr, before.output_addr, before.control_addr)
    assert (after.input_addr, after.output_addr, after.control_addr) == addresses
    await head.attach(after.incarnation)
    node.engine.send_tokens(0, "of the new engine")
    assert await head.read_ids(1) == ["of the new engine"]
    assert node.launcher.engines[0].process.shutdowns == [0.0], "a lost engine gets no time to finish"


async def test_heads_are_notified_of_a_loss_before_the_coordinator(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    detach_all, announce = AttachedHeads.detach_all, Announcer.announce
    monkeypatch.setattr(AttachedHeads, "detach_all", lambda *args: (told.append("heads"), detach_all(*args)))
    monkeypatch.setattr(Announcer, "announce", lambda *args, **more: (told.append(args[1]), announce(*args, **more)))
    async with node.attached() as head:
        node.engine.process.die()
        assert (await head.next_status()).status is ReplicaStatus.ERROR
        await eventually(lambda: len(told) >= 2)
    assert told[:2] == ["heads", ReplicaStatus.ERROR]


@pytest.mark.parametrize(
    ("ended", "in_group", "failed"),
    [
        ("SIGILL", False, True),
        ("SIGKILL", False, False),
        pytest.param("SIGILL", True, False, id="a rank that ends with its group says nothing about its requests"),
    ],
)
async def test_heads_receive_the_exit_reason_of_an_engine(
    head: Head, node: Node, ended: str, in_group: bool, failed: bool
) -> None:
    await node.up()
    if in_group:
        vars(node.launcher)["group_of"] = lambda replica_id: [replica_id]
    node.engine.process.exit_note = f"its worker VllmWorker-0 was ended by {ended}"
    node.engine.report_death()
    status = await head.next_status()
    assert status.reason == f"the engine reported its own death: its worker VllmWorker-0 was ended by {ended}"
    assert status.engine_failed is failed


async def test_a_hung_engine_is_reported_kept_and_put_back_into_service(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = told_probes(monkeypatch)
    node = await start_node()
    before = await node.up()
    async with node.attached() as head:
        node.engine.hang()
        probes[0].hangs()
        assert await head.next_status() == Status(head.attached.lease, ReplicaStatus.ERROR, "no answer")
        refusal = await head.try_attach(before.incarnation)
        assert isinstance(refusal, AttachRefused)
        assert not refusal.lasting
        node.engine.recover()
        probes[0].answers()
        after = await node.up(after=before.incarnation)
        assert len(node.launcher.engines) == 1
        # The head's row is the old one, for its coordinator may be away.
        attached = await head.attach(before.incarnation)
        assert attached.incarnation == after.incarnation
        # Another slot, if the first is not free yet.
        node.engine.send_tokens(attached.client_index, "alive")
        assert await head.read_ids(1) == ["alive"]


async def test_an_engine_whose_sockets_were_removed_is_restarted_once_no_head_uses_it(
    node: Node, head: Head, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_engine, "EXIT_GRACE_S", 0.0)
    before = await node.up()
    shutil.rmtree(socket_folder)
    os.mkdir(socket_folder)
    async with node.head() as other:
        refusal = await other.try_attach(before.incarnation)
        assert isinstance(refusal, AttachRefused)
        assert f"No such file or directory: '{socket_folder}" in refusal.reason
        assert not refusal.lasting
        # What has its connections goes on.
        await head.add("a")
        node.engine.send_tokens(0, "of the same engine")
        assert await head.read_ids(1) == ["of the same engine"]
        assert (await head.renew()).status is ReplicaStatus.UP  # type: ignore[union-attr]
        await head.detach()

        async def restarts() -> bool:
            await other.try_attach(before.incarnation)
            return node.launcher.engines[0].process.ended

        await repeated(restarts, "a restart")
        after = await node.up(after=before.incarnation)
        await other.attach(after.incarnation)


async def test_an_engine_is_busy_while_a_head_says_that_it_has_a_long_call_open(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = told_probes(monkeypatch)
    node = await start_node()
    async with node.attached() as head:
        for busy in (False, True, False, True):
            await head.renew(busy)
            assert probes[0].engine.is_busy is busy
        # A head that is gone has no call open.
        await head.detach()
        await eventually(lambda: not probes[0].engine.is_busy)


async def test_a_first_start_that_fails_ends_the_server(start_node: StartNode) -> None:
    node: Node = await start_node(launcher_fails=1)
    with pytest.raises(ReplicaError, match="did not start"):
        await asyncio.wait_for(node.running, 10)


async def test_a_server_that_has_served_keeps_its_node_from_ending(start_node: StartNode) -> None:
    first_starts = FirstStarts(1)
    node: Node = await start_node(first_starts=first_starts)
    await node.up()
    assert not first_starts.failed("another one")


def test_a_first_start_fails_for_good_only_if_those_of_all_engines_of_the_node_have_failed() -> None:
    both_fail, one_serves = FirstStarts(2), FirstStarts(2)
    assert [both_fail.failed(engine) for engine in ("a", "a", "b", "a")] == [False, False, True, True]
    assert not one_serves.failed("a")
    one_serves.succeeded()
    assert [one_serves.failed(engine) for engine in ("a", "b")] == [False, False]


async def test_a_first_start_that_fails_beside_a_serving_engine_is_repeated(
    start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    first_starts = FirstStarts(2)
    first_starts.succeeded()
    node: Node = await start_node(launcher_fails=2, first_starts=first_starts)
    await node.up()
    assert node.delays == [1.0, 2.0]
    again = (
        "Replica 0 of this node did not start; it is tried again in 2 s, beside the others: the engine did not start"
    )
    assert again in caplog.text


async def test_a_server_that_is_cancelled_twice_ends_its_engine(node: Node, socket_folder: Path) -> None:
    await node.up()
    for _ in range(20):
        node.running.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([node.running])
    assert node.engine.process.ended
    assert os.listdir(socket_folder) == []
