"""Heads attach, exchange messages with the engine, and go."""

import asyncio
import errno
import logging
import threading
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.replicas.server.conftest import Node, StartNode
from tests.replicas.server.heads import Head
from vllm_omni_plugin.coordinator import OmniCoordinator, ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState, StageState
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.control.lease_messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Attached,
    AttachRefused,
    Expired,
    StateTold,
    Status,
    encode,
)
from vllm_omni_plugin.replicas.replica_server.attached_heads import AttachedHeads
from vllm_omni_plugin.replicas.replica_server.data_proxy import DataProxy
from vllm_omni_plugin.replicas.replica_server.served_engine import HEAD_SLOTS

SECRETS = Secrets(["a secret that both ends know"])
OTHER_DTYPE = {"model": "tiny", "dtype": "bf16"}
TOLD = ReplicaState(3, "a", StageState(weight_version="v2"))


def fail_next_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next release of an output slot fail."""
    close, failures = DataProxy.close, [OSError(errno.EMFILE, "Too many open files")]

    def close_and_fail_once(proxy: DataProxy) -> None:
        close(proxy)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(DataProxy, "close", close_and_fail_once)


async def test_requests_and_outputs_pass_between_head_and_engine(head: Head, node: Node) -> None:
    await head.add("a")
    await eventually(lambda: [b"add", msgspec.json.encode({"request_id": "a"})] in node.engine.frames)
    node.engine.send_tokens(0, "a", "b", "c")
    assert await head.read_ids(3) == ["a", "b", "c"]
    assert head.attached.ready_response == b'"ready"'
    assert head.attached.client_index == 0
    assert await head.renew() == Status(head.attached.lease, ReplicaStatus.UP)


async def test_a_replica_has_the_id_that_heads_know_also_at_a_new_coordinator(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    info = await node.up()
    async with node.head() as head:
        assert isinstance(await head.try_attach(info.incarnation, replica_id=7), Attached)
    assert f"Replica 0 of this node is replica 0.7 of the fleet, at {info.input_addr}." in caplog.text
    addresses = node.coordinator.router_zmq_addr, node.coordinator.pub_zmq_addr
    await asyncio.to_thread(node.coordinator.close)
    node.coordinator = await asyncio.to_thread(OmniCoordinator, *addresses)
    assert (await node.up()).replica_id == 7


async def test_a_server_keeps_what_its_engine_was_told_and_passes_it_on_to_the_other_heads(node: Node) -> None:
    async with node.attached() as first, node.attached() as second:
        assert first.attached.told == NOTHING_TOLD
        await first.send_control(StateTold(first.attached.lease, TOLD))
        assert await second.next_message() == StateTold(second.attached.lease, TOLD)
        # An earlier one, of a head that knows less.
        await second.send_control(StateTold(second.attached.lease, ReplicaState(2, "x")))
        await second.renew()
        async with node.attached() as third:
            assert third.attached.told == TOLD


async def test_after_its_last_head_an_engine_is_as_it_was_told_by_a_fleet_that_is_gone(node: Node) -> None:
    async with node.attached() as first:
        await first.send_control(StateTold(first.attached.lease, TOLD))
        await detach_and_wait(first)
    async with node.attached() as later:
        assert later.attached.told == ReplicaState(state=TOLD.state)
        await later.send_control(StateTold(later.attached.lease, ReplicaState(1, "later")))
        await later.renew()
        async with node.attached() as last:
            assert last.attached.told == ReplicaState(1, "later")


async def test_heads_are_told_that_another_one_makes_a_long_call(node: Node) -> None:
    async with node.attached() as first, node.attached() as second:
        await first.renew(busy=True)
        assert await second.renew() == Status(second.attached.lease, ReplicaStatus.UP, busy=True)
        await first.renew()
        assert await second.renew() == Status(second.attached.lease, ReplicaStatus.UP)


async def detach_and_wait(head: Head) -> None:
    """Detach, and wait until the server has read it; the next head's connection may be faster than this one."""
    await head.detach()
    assert await head.renew() == Expired(head.attached.lease)


async def test_a_restarted_engine_was_told_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node.attached() as first:
        await first.send_control(StateTold(first.attached.lease, TOLD))
        before = await node.up()
        fail_next_close(monkeypatch)
        await first.detach()
        await node.up(after=before.incarnation)
    async with node.attached() as later:
        assert later.attached.told == NOTHING_TOLD


@pytest.mark.parametrize(
    ("field", "value", "lasting", "reason"),
    [
        ("protocol", 99, True, "protocol: head has 99, replica 5"),
        ("protocol", OLDEST_PROTOCOL_VERSION - 1, True, "protocol: head has 4, replica 5"),
        ("protocol", PROTOCOL_VERSION + 3, True, "protocol: head has 8, replica 5"),
        ("incarnation", 3, False, "incarnation: head has 3"),
        ("incarnation", 2**62, False, "incarnation: head has 4611686018427387904"),
        ("fingerprint", OTHER_DTYPE, True, "dtype: head has bf16, replica float32"),
        ("fingerprint", {}, True, "model: head has nothing, replica tiny"),
    ],
)
async def test_a_head_with_another_configuration_is_refused_with_both_values(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, field: str, value: object, lasting: bool, reason: str
) -> None:
    admit, machines = AttachedHeads.admit, ["10.0.0.1", "10.0.0.2"]
    monkeypatch.setattr(AttachedHeads, "admit", lambda heads, engine, _: admit(heads, engine, machines))
    node = await start_node(secrets=SECRETS)
    info = await node.up()
    async with node.head() as head:
        answer = await head.try_attach(info.incarnation, **{field: value})
    assert isinstance(answer, AttachRefused)
    assert answer.lasting is lasting
    assert reason in answer.reason
    assert answer.other_generation is ("dtype" in reason)
    assert answer.machines == (machines if answer.other_generation else []), "its pods may ask any head"


async def test_a_head_of_one_of_the_next_two_versions_attaches_since_it_reads_this_one(node: Node) -> None:
    info = await node.up()
    for protocol in (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2):
        async with node.head() as head:
            assert isinstance(await head.try_attach(info.incarnation, protocol=protocol), Attached)


@pytest.mark.parametrize("fingerprint", [{"model": "tiny"}, {"model": "tiny", "dtype": "float32", "later": "x"}])
async def test_what_a_head_of_another_version_of_this_plugin_does_not_compare_is_no_difference(
    node: Node, fingerprint: dict[str, str]
) -> None:
    info = await node.up()
    async with node.head() as head:
        attached = await head.try_attach(info.incarnation, fingerprint=fingerprint)
    assert isinstance(attached, Attached)
    assert attached.fingerprint == {}, "without a secret, one who knows the model must not learn the rest"


async def test_it_announces_whether_a_head_is_attached(start_node: StartNode) -> None:
    node = await start_node(heartbeat_interval=0.05)
    assert (await node.up()).in_use is False
    async with node.attached() as head:
        await eventually(lambda: node.info is not None and node.info.in_use is True)
        await detach_and_wait(head)
        await eventually(lambda: node.info is not None and node.info.in_use is False)


async def test_heads_that_differ_in_another_stage_of_their_pipeline_use_it_one_generation_after_the_other(
    node: Node,
) -> None:
    info = await node.up()
    async with node.head() as first, node.head() as same, node.head() as other, node.head() as older:
        assert isinstance(await first.try_attach(info.incarnation, generation="a"), Attached)
        assert isinstance(await same.try_attach(info.incarnation, generation="a"), Attached)
        refused = await other.try_attach(info.incarnation, generation="b")
        assert isinstance(refused, AttachRefused)
        assert not refused.lasting
        assert "its own replicas of every stage" in refused.reason
        # A head that names none may be of any.
        assert isinstance(await older.try_attach(info.incarnation), Attached)
        assert isinstance(await other.try_attach(info.incarnation, generation="b"), AttachRefused)


@pytest.mark.parametrize("said", [{"protocol": 99}, {"fingerprint": {}}, {"fingerprint": OTHER_DTYPE}])
async def test_without_a_secret_only_the_log_names_the_difference(
    node: Node, caplog: pytest.LogCaptureFixture, said: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    info = await node.up()
    async with node.head() as stranger:
        answers = [await stranger.try_attach(info.incarnation, **said) for _ in range(2)]
    told = encode(answers[0])
    assert answers[0] == answers[1]
    assert not any(word in told for word in (b"tiny", b"model", b"dtype", b"float32", b"99"))
    assert any(text in caplog.text for text in ("replica tiny", "replica float32", "head has 99"))


async def test_a_head_is_refused_while_all_slots_are_leased(node: Node) -> None:
    async with AsyncExitStack() as heads:
        attached = [await heads.enter_async_context(node.attached()) for _ in range(HEAD_SLOTS)]
        one_more = await heads.enter_async_context(node.head())
        info = await node.up()
        answer = await one_more.try_attach(info.incarnation)
        assert isinstance(answer, AttachRefused)
        assert not answer.lasting
        await attached[-1].detach()
        await one_more.attach(info.incarnation)


async def test_a_silent_head_loses_its_lease_and_its_requests(start_node: StartNode) -> None:
    node = await start_node(heartbeat_timeout=2.0)
    async with node.attached() as head:
        lease = head.attached.lease
        message = await head.next_message()
        assert message == Expired(lease)
        node.engine.send_tokens(0, "orphan")
        await eventually(lambda: node.engine.aborted == ["orphan"])
        await eventually(lambda: (HEAD_SLOTS, "abort_requests") in node.engine.calls)
        assert await head.renew() == Expired(lease)


async def test_the_end_of_the_last_lease_does_not_wake_a_sleeping_engine(node: Node) -> None:
    async with node.attached() as head:
        node.engine.sleeps = True
        await head.detach()
        await eventually(lambda: (HEAD_SLOTS, "abort_requests") in node.engine.calls)
        # Granted on its slot once the reset is over.
        async with node.attached():
            pass
    assert (HEAD_SLOTS, "wake_up") not in node.engine.calls


async def test_a_failed_release_restarts_the_engine_and_leases_still_expire(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_next_close(monkeypatch)
    node = await start_node(heartbeat_timeout=1.5)
    before = await node.up()
    async with node.attached():
        after = await node.up(after=before.incarnation)
    assert node.launcher.engines[0].process.ended
    async with node.head() as head:
        attached = await head.attach(after.incarnation)
        assert await head.next_message() == Expired(attached.lease)


async def test_a_slot_is_not_leased_while_the_adapter_files_of_its_former_head_are_read_and_others_are(
    start_node: StartNode,
) -> None:
    is_reading, was_read = threading.Event(), threading.Event()

    def read_files(frames: object) -> None:
        is_reading.set()
        was_read.wait(20)

    node = await start_node(message_filter=read_files)
    async with node.attached() as head:
        await head.add("a")
        assert await asyncio.to_thread(is_reading.wait, 20)
        await head.detach()
        async with node.attached() as other:
            assert (other.attached.client_index, was_read.is_set()) == (1, False)
        was_read.set()
        async with node.attached(slot=0):
            pass


async def test_a_lease_is_valid_on_its_own_connection_only(node: Node) -> None:
    async with node.attached() as head, node.head() as other:
        other.attached = head.attached
        assert await other.renew() == Expired(head.attached.lease)
        await other.detach()
        await other.request_drain()
        assert await head.renew() == Status(head.attached.lease, ReplicaStatus.UP)


async def test_outputs_of_a_former_head_never_reach_the_next(node: Node) -> None:
    for turn in range(5):
        async with node.attached() as head:
            slot = head.attached.client_index
            node.engine.send_tokens(slot, *[f"of turn {turn}"] * 3000)
            assert await head.read_ids(1) == [f"of turn {turn}"]
            await head.detach()
    async with node.attached() as last:
        node.engine.send_tokens(last.attached.client_index, "mine")
        assert await last.read_ids(1) == ["mine"]


async def test_a_second_lease_of_a_head_ends_the_first(head: Head, node: Node) -> None:
    info = await node.up()
    former = head.attached
    await head.attach(info.incarnation)
    head.attached, current = former, head.attached
    assert await head.renew() == Expired(former.lease)
    head.attached = current
    assert isinstance(await head.renew(), Status)


async def test_bursts_longer_than_every_queue_arrive_complete_and_in_order(node: Node) -> None:
    ids = [f"r{number}" for number in range(5000)]
    async with node.attached() as head:
        for request_id in ids:
            await head.add(request_id)
        node.engine.send_tokens(0, *ids)
        assert await head.read_ids(len(ids)) == ids
        await eventually(lambda: node.engine.added == ids)


async def test_multipart_messages_stay_complete_while_leases_end(node: Node) -> None:
    parts = [b"add", b'{"request_id": "r"}', b"second part", b"third part"]
    for _ in range(20):
        async with node.attached() as head:
            for _ in range(200):
                await head.send(*parts)
            await head.detach()
    await node.up()
    arrived = [frames for frames in node.engine.frames if frames[0] not in (b"utility", b"abort")]
    assert arrived
    assert all(frames == parts for frames in arrived)
