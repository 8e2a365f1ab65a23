"""Puts what a head receives from the coordinator into its orchestrator's queue."""

from contextlib import suppress

from vllm_omni_plugin.coordinator import ListDelta, ReplicaKey, ReplicaList, SessionEvent
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    RegisterRemoteReplica,
    RpcMessage,
    UnregisterRemoteReplica,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue


class SessionListener:
    """`on_event` and `on_update` of the clients of heads and hubs, called from one thread. Feeds `rpc_async_queue`."""

    def __init__(self, queue: ThreadQueue[RpcMessage]) -> None:
        self._queue = queue
        self._listed: set[ReplicaKey] = set()

    def __call__(self, event: SessionEvent | ReplicaList) -> None:
        # A closed queue needs no message: the head detaches from all replicas, and the coordinator sees it leave.
        with suppress(QueueClosedError):
            for message in self._changes(event) if isinstance(event, ReplicaList) else [event]:
                self._queue.put(message)

    def _changes(self, replica_list: ReplicaList) -> list[RegisterRemoteReplica | UnregisterRemoteReplica]:
        """Departures come first, so that their ids are free again.

        A replica has left only if a list lacks it; without lists, nothing changes. A head cannot attach to replicas
        without a control address.
        """
        rows = [RegisterRemoteReplica(info, accepts=True) for info in replica_list.replicas]
        rows += [RegisterRemoteReplica(info, accepts=False) for info in replica_list.no_new_work]
        new = {ReplicaKey.of(row.info): row for row in rows if row.info.control_addr}
        if isinstance(replica_list, ListDelta):
            gone = self._listed.intersection(replica_list.removed)
        else:
            gone = self._listed - new.keys()
        self._listed = (self._listed - gone) | new.keys()
        left = [UnregisterRemoteReplica(*key, reason="the coordinator no longer lists it") for key in sorted(gone)]
        return [*left, *new.values()]
