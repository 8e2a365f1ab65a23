"""What a head hears at its seat reaches its orchestrator in order, and nobody once it has closed."""

from vllm_omni_plugin.coordinator import PeerCall, ReplicaList, ReplicaWork
from vllm_omni_plugin.orchestrator.messages import (
    PeerCalled,
    PeersLost,
    PeerWork,
    RegisterRemoteReplica,
    RpcMessage,
    SeatTaken,
    WorkWanted,
)
from vllm_omni_plugin.orchestrator.seat_listener import SeatListener
from vllm_omni_plugin.orchestrator.thread_queue import ThreadQueue

from .test_replica_list import row

WORK = [ReplicaWork(7, 3, 100)]
CALL = PeerCall("other", 7, "drain", {"replica": "0.1"})


async def test_everything_becomes_a_message_in_the_order_in_which_it_was_heard() -> None:
    queue: ThreadQueue[RpcMessage] = ThreadQueue(10)
    listener = SeatListener(queue)
    listener.seat_taken()
    listener.work_wanted()
    listener.replicas_listed(ReplicaList([row(1)], 1.0))
    listener.work_reported("other", WORK, True)
    listener.called(CALL)
    listener.head_left("other")
    listener.seat_lost()
    assert await queue.get_batch() == [
        SeatTaken(),
        WorkWanted(),
        RegisterRemoteReplica(row(1), accepts=True),
        PeerWork("other", WORK, full=True),
        PeerCalled(CALL),
        PeersLost(("other",)),
        PeersLost(None),
    ]


def test_a_head_that_has_closed_hears_nothing_more() -> None:
    queue: ThreadQueue[RpcMessage] = ThreadQueue(10)
    listener = SeatListener(queue)
    queue.close()
    listener.head_left("other")
    listener.replicas_listed(ReplicaList([row(1)], 1.0))
