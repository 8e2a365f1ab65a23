"""Replicas of other processes that join and leave, and operators' actions on replicas."""

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator import PoolMember
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    Explain,
    ManageReplica,
    RegisterRemoteReplica,
    ReplaceAdmission,
    UnregisterRemoteReplica,
)

INFO = ReplicaInfo("tcp://a:1", "tcp://a:2", 0, ReplicaStatus.UP, 0, 0.0, 0.0)
REGISTER = RegisterRemoteReplica(INFO, accepts=True)


class Keeper:
    """Stands for `RemoteReplicas`, and records its calls."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self._fault = fault

    def _note(self, what: Any) -> None:
        self.calls.append(what)
        if self._fault is not None:
            raise self._fault

    def register(self, message: RegisterRemoteReplica) -> None:
        self._note(message)

    def unregister(self, message: UnregisterRemoteReplica) -> None:
        self._note(message)

    def leave(self, member: PoolMember) -> None:
        self._note(member)


@pytest.mark.parametrize("keeper", [None, Keeper(RuntimeError("bug"))], ids=["nobody", "faulty"])
async def test_a_change_that_cannot_be_made_stops_nothing(keeper: Keeper | None) -> None:
    fleet = FakeFleet()
    fleet.remote = keeper
    async with fleet:
        fleet.orchestrator.rpc_async_queue.put(REGISTER)
        await fleet.manage("drain", 0)
        assert len(fleet.pool.serving) == 1


@pytest.mark.parametrize("remote", [False, True])
async def test_a_removal_calls_leave_of_the_member(fleet: FakeFleet, remote: bool) -> None:
    removed = []
    member = fleet.pool.member(1)
    member.remote, member.leave = remote, lambda: removed.append(1)
    await fleet.manage("remove", 1)
    assert removed == [1]


@pytest.mark.parametrize(("stage_id", "replica_id"), [(0, 7), (3, 0)])
async def test_an_action_on_an_unknown_replica_is_refused(fleet: FakeFleet, stage_id: int, replica_id: int) -> None:
    with pytest.raises(ReplicaError, match=f"stage {stage_id} has no replica {replica_id}"):
        await fleet.manage("drain", replica_id, stage_id)


@pytest.mark.parametrize(
    "message",
    [
        ManageReplica("drain", 0, 0, Future()),
        Explain(0, {}, Future(), RequestTerms(), None),
        ReplaceAdmission(AdmissionConfig(), Future()),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_what_is_left_in_a_closed_queue_is_cancelled(message: Any) -> None:
    fleet = FakeFleet()
    fleet.orchestrator.rpc_async_queue.put(message)
    fleet.orchestrator.rpc_async_queue.put(REGISTER)
    fleet.orchestrator.close_queues()
    with pytest.raises(CancelledError):
        message.reply.result(0)


async def test_the_client_is_notified_of_joins_and_leaves(fleet: FakeFleet) -> None:
    member = fleet.pool.add()
    fleet.orchestrator.replica_joined(member, b"ready")
    fleet.join(member)
    fleet.lose(2)
    fleet.orchestrator.replica_left(member)
    await fleet.read()
    assert [(type(change).__name__, change.replica_id) for change in fleet.changes] == [
        ("ReplicaJoined", 2),
        ("ReplicaLeft", 2),
    ]
    assert fleet.pool.add().replica_id == 2
