"""What a head hears of the coordinator, as messages for its orchestrator."""

from contextlib import suppress

from vllm_omni_plugin.coordinator import ListDelta, ReplicaKey, ReplicaList, SessionEvent
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    RegisterRemoteReplica,
    RpcMessage,
    UnregisterRemoteReplica,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue


class SessionListener:
    """`on_event` of `OmniCoordClientForHead`, or `on_update` of `OmniCoordClientForHub`. Called from one thread, any.

    Args:
        queue: the orchestrator's `rpc_async_queue`.
    """

    def __init__(self, queue: ThreadQueue[RpcMessage]) -> None:
        self._queue = queue
        self._listed: set[ReplicaKey] = set()

    def __call__(self, event: SessionEvent | ReplicaList) -> None:
        """Queue it as it came; of a list, each replica that it names, after those that have left."""
        # A head that has closed its queues hears nothing more: the coordinator sees it leave, and it lets its replicas
        # go without being told.
        with suppress(QueueClosedError):
            for message in self._changes(event) if isinstance(event, ReplicaList) else [event]:
                self._queue.force_put(message)

    def _changes(self, news: ReplicaList) -> list[RegisterRemoteReplica | UnregisterRemoteReplica]:
        """Departures come first, so that their ids are free again.

        Only a list without a replica is its departure; a coordinator that is silent sends none. Replicas without a
        control address are none that a head attaches to.
        """
        rows = [RegisterRemoteReplica(info, accepts=True) for info in news.replicas]
        rows += [RegisterRemoteReplica(info, accepts=False) for info in news.no_new_work]
        new = {ReplicaKey.of(row.info): row for row in rows if row.info.control_addr}
        gone = self._listed.intersection(news.removed) if isinstance(news, ListDelta) else self._listed - new.keys()
        self._listed = (self._listed - gone) | new.keys()
        left = [UnregisterRemoteReplica(*key, reason="the coordinator no longer lists it") for key in sorted(gone)]
        return [*left, *new.values()]
