"""Lists become changes of membership, and all messages of the coordinator are queued in order."""

from typing import Any

from vllm_omni_plugin.coordinator import (
    FullList,
    HeadLeft,
    HeadWork,
    ListDelta,
    ReplicaInfo,
    ReplicaKey,
    ReplicaList,
    ReplicaStatus,
    ReplicaWork,
    SessionEvent,
    SessionLost,
    Welcome,
)
from vllm_omni_plugin.orchestrator import SessionListener
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    RegisterRemoteReplica,
    RpcMessage,
    UnregisterRemoteReplica,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import ThreadQueue

REASON = "the coordinator no longer lists it"


def row(number: int, **fields: Any) -> ReplicaInfo:
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


def registered(number: int, accepts: bool = True) -> RegisterRemoteReplica:
    return RegisterRemoteReplica(row(number), accepts)


def unregistered(number: int) -> UnregisterRemoteReplica:
    return UnregisterRemoteReplica(0, f"tcp://n:{number}1", f"tcp://n:{number}2", REASON)


async def queued(*events: SessionEvent | ReplicaList) -> list[RpcMessage]:
    queue: ThreadQueue[RpcMessage] = ThreadQueue()
    listener = SessionListener(queue)
    for event in events:
        listener(event)
    return await queue.get_batch()


async def test_events_are_queued_unchanged_and_lists_as_their_changes() -> None:
    welcome, work = Welcome(["other"]), HeadWork("other", True, [ReplicaWork(7, 3, 100)])
    assert await queued(
        welcome,
        FullList([row(1)], 1.0),
        work,
        ListDelta([], 2.0, [row(1)], removed=[]),
        HeadLeft("other"),
        SessionLost(),
    ) == [welcome, registered(1), work, registered(1, accepts=False), HeadLeft("other"), SessionLost()]


async def test_a_replica_that_a_whole_list_lacks_is_unregistered_before_others_are_registered() -> None:
    for whole in (FullList, ReplicaList):
        assert await queued(whole([row(1)], 1.0), whole([row(2)], 2.0)) == [
            registered(1),
            unregistered(1),
            registered(2),
        ]


async def test_a_delta_unregisters_only_the_replicas_that_it_names() -> None:
    gone = [ReplicaKey.of(row(1)), ReplicaKey.of(row(9))]
    assert await queued(
        FullList([row(1), row(2)], 1.0), ListDelta([row(3)], 2.0, removed=gone), ListDelta([], 3.0, removed=gone)
    ) == [registered(1), registered(2), unregistered(1), registered(3)]


async def test_replicas_that_leave_together_do_so_in_order_of_their_keys_whatever_the_order_they_came_in() -> None:
    came = [row(number) for number in (3, 1, 4, 2, 5)]
    gone = [ReplicaKey.of(replica) for replica in came]
    for news in (ListDelta([], 2.0, removed=gone), FullList([], 2.0)):
        queued_now = await queued(FullList(came, 1.0), news)
        assert queued_now[len(came) :] == [unregistered(number) for number in (1, 2, 3, 4, 5)]


async def test_a_replica_that_needs_no_attaching_is_left_alone() -> None:
    assert await queued(FullList([row(1, control_addr=""), row(2)], 1.0)) == [registered(2)]


def test_a_closed_head_gets_no_more_messages() -> None:
    queue: ThreadQueue[RpcMessage] = ThreadQueue()
    listener = SessionListener(queue)
    queue.close()
    listener(HeadLeft("other"))
    listener(FullList([row(1)], 1.0))
