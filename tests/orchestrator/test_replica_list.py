"""What one list after another means for a head."""

from typing import Any

from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaList, ReplicaStatus
from vllm_omni_plugin.orchestrator.fleet_state.session_listener import changes
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    RegisterRemoteReplica,
    UnregisterRemoteReplica,
)

EMPTY = ReplicaList([], 0.0)
REASON = "the coordinator no longer lists it"


def row(number: int, **fields: Any) -> ReplicaInfo:
    """The replica with this number."""
    values: dict[str, Any] = {
        "stage_id": 0,
        "status": ReplicaStatus.UP,
        "queue_length": 0,
        "last_heartbeat": 1.0,
        "registered_at": 1.0,
        "incarnation": 1,
        "control_addr": f"tcp://n:{number}",
    }
    return ReplicaInfo(f"tcp://n:{number}1", f"tcp://n:{number}2", **(values | fields))


def listed(*rows: ReplicaInfo, no_new_work: tuple[ReplicaInfo, ...] = ()) -> ReplicaList:
    return ReplicaList(list(rows), 1.0, list(no_new_work))


def test_new_replicas_are_registered() -> None:
    assert changes(EMPTY, listed(row(1), row(2))) == [
        RegisterRemoteReplica(row(1), accepts=True),
        RegisterRemoteReplica(row(2), accepts=True),
    ]


def test_a_replica_in_neither_part_of_the_list_is_unregistered_before_others_are_registered() -> None:
    assert changes(listed(row(1)), listed(row(2))) == [
        UnregisterRemoteReplica(0, "tcp://n:11", "tcp://n:12", REASON),
        RegisterRemoteReplica(row(2), accepts=True),
    ]


def test_a_replica_that_shall_get_no_new_work_stays_registered() -> None:
    suspect = listed(no_new_work=(row(1),))
    assert changes(listed(row(1)), suspect) == [RegisterRemoteReplica(row(1), accepts=False)]
    assert changes(suspect, listed(row(1))) == [RegisterRemoteReplica(row(1), accepts=True)]


def test_a_new_incarnation_address_or_status_is_told() -> None:
    for changed in (row(1, incarnation=2), row(1, control_addr="tcp://n:9"), row(1, status=ReplicaStatus.DRAINING)):
        assert changes(listed(row(1)), listed(changed)) == [RegisterRemoteReplica(changed, accepts=True)]


def test_heartbeats_and_queue_lengths_change_nothing() -> None:
    assert changes(listed(row(1)), listed(row(1, last_heartbeat=9.0, queue_length=5))) == []


def test_a_replica_that_needs_no_attaching_is_left_alone() -> None:
    assert changes(EMPTY, listed(row(1, control_addr=""))) == []
