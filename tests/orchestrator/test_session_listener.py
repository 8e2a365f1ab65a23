"""What a head hears of the coordinator reaches its orchestrator in order, and nobody once it has closed."""

from vllm_omni_plugin.coordinator import HeadLeft, PeerWork, ReplicaList, ReplicaWork, SessionLost, Welcome
from vllm_omni_plugin.orchestrator.fleet_state.session_listener import SessionListener
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RegisterRemoteReplica, RpcMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import ThreadQueue

from .test_replica_list import row

WELCOME, WORK = Welcome(["other"], False), PeerWork("other", True, [ReplicaWork(7, 3, 100)])


async def test_everything_is_queued_as_it_came_and_of_a_list_what_has_changed() -> None:
    queue: ThreadQueue[RpcMessage] = ThreadQueue(10)
    listener = SessionListener(queue)
    for event in (WELCOME, ReplicaList([row(1)], 1.0), WORK, HeadLeft("other"), SessionLost()):
        listener(event)
    register = RegisterRemoteReplica(row(1), accepts=True)
    assert await queue.get_batch() == [WELCOME, register, WORK, HeadLeft("other"), SessionLost()]


def test_a_head_that_has_closed_hears_nothing_more() -> None:
    queue: ThreadQueue[RpcMessage] = ThreadQueue(10)
    listener = SessionListener(queue)
    queue.close()
    listener(HeadLeft("other"))
    listener(ReplicaList([row(1)], 1.0))
