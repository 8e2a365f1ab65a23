"""What a head hears at its seat, as messages for its orchestrator."""

from collections.abc import Sequence
from contextlib import suppress

from vllm_omni_plugin.coordinator import PeerCall, ReplicaList, ReplicaWork
from vllm_omni_plugin.orchestrator.messages import PeerCalled, PeersLost, PeerWork, RpcMessage, SeatTaken, WorkWanted
from vllm_omni_plugin.orchestrator.replica_list import ReplicaListWatcher
from vllm_omni_plugin.orchestrator.thread_queue import QueueClosedError, ThreadQueue


class SeatListener:
    """Satisfies `HeadListener`. Called from one thread, any.

    Args:
        queue: the orchestrator's `rpc_async_queue`.
    """

    def __init__(self, queue: ThreadQueue[RpcMessage]) -> None:
        self._queue = queue
        self._watcher = ReplicaListWatcher(queue)

    def seat_taken(self) -> None:
        """See `HeadListener`."""
        self._tell(SeatTaken())

    def replicas_listed(self, replicas: ReplicaList) -> None:
        """See `HeadListener`."""
        self._watcher.update(replicas)

    def work_reported(self, head_id: str, work: Sequence[ReplicaWork], full: bool) -> None:
        """See `HeadListener`."""
        self._tell(PeerWork(head_id, work, full))

    def head_left(self, head_id: str) -> None:
        """See `HeadListener`."""
        self._tell(PeersLost((head_id,)))

    def seat_lost(self) -> None:
        """See `HeadListener`."""
        self._tell(PeersLost(None))

    def work_wanted(self) -> None:
        """See `HeadListener`."""
        self._tell(WorkWanted())

    def called(self, call: PeerCall) -> None:
        """See `HeadListener`."""
        self._tell(PeerCalled(call))

    def _tell(self, message: RpcMessage) -> None:
        # A head that has closed its queues hears nothing more, and the coordinator sees it leave.
        with suppress(QueueClosedError):
            self._queue.force_put(message)
