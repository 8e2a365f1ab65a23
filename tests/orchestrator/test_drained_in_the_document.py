"""Which drained replicas the fleet's document has."""

import msgspec
import pytest
from msgspec.structs import replace

from tests.fakes.fleet import FakeFleet
from tests.orchestrator.head_bus import FakeHead, HeadBus
from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, StageState, check_size
from vllm_omni_plugin.orchestrator.fleet_state import fleet_document
from vllm_omni_plugin.orchestrator.fleet_state.fleet_document import FleetDocument
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter


async def test_a_drain_is_recorded_by_heads_that_are_not_attached_to_the_replica(heads: list[FakeHead]) -> None:
    heads[0].attach(4)
    await heads[0].manage("drain", 4)
    member = heads[0].pool.member(4)
    assert heads[1].fleet_calls.state.drained == ((0, member.input_addr, member.output_addr),)


async def test_a_drained_fleet_stays_drained_at_a_head_that_has_not_found_it_yet(fleet: FakeFleet) -> None:
    """Also with long addresses, and beside many adapters."""
    address = "tcp://[fd00:1234:5678:9abc:def0:1234:5678:9abc]:{}"
    drained = tuple(ReplicaKey(1023, address.format(10_000 + i), address.format(50_000 + i)) for i in range(1000))
    document = FleetDocument(fleet.orchestrator, "h" * 128)
    document.state = FleetState(1, "another", drained=drained[1:])
    state = document.after_action("drain", drained[0])
    assert state.drained == (*drained[1:], drained[0])
    adapters = tuple(Adapter(f"adapter {i}", i, f"/models/loras/adapter-{i}") for i in range(1, 500))
    check_size(replace(state, stages=(StageState(adapters),)))


async def test_of_drained_replicas_that_left_only_the_last_ones_are_remembered(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some thousand drains of nodes with new ports, no call that changes the document fitted into a frame."""
    four = [ReplicaKey.of(heads[0].pool.member(0))] * 4
    monkeypatch.setattr(fleet_document, "MAX_DRAINED_BYTES", len(msgspec.json.encode(four)))
    keys: dict[int, ReplicaKey] = {}
    for replica_id in (1, 4, 5, 6, 7, 0):
        if replica_id > 1:
            heads[0].attach(replica_id)
        member = heads[0].pool.member(replica_id)
        keys[replica_id] = ReplicaKey.of(member)
        await heads[0].manage("drain", replica_id)
        if replica_id > 1:
            heads[0].orchestrator.replica_lost(member, "its node ended")
            heads[0].orchestrator.replica_left(member)
    states = [head.fleet_calls.state.drained for head in heads]
    assert states == [tuple(keys[replica_id] for replica_id in (1, 6, 7, 0))] * 3


async def test_a_private_replica_is_drained_by_its_own_head_only(bus: HeadBus, heads: list[FakeHead]) -> None:
    heads[0].attach(4, private=True)
    await heads[0].manage("drain", 4)
    assert (bus.calls, heads[0].fleet_calls.state.drained) == ([], ())
    await heads[0].join_fleet()
    assert heads[0].pool.member(4).cordons == {ADMIN_CORDON}, "what others drained is no matter of it"
