"""What a head hears of the coordinator, as messages for its orchestrator."""

from contextlib import suppress

from vllm_omni_plugin.coordinator import ReplicaKey, ReplicaList, ReplicaStatus, SessionEvent
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    RegisterRemoteReplica,
    RpcMessage,
    UnregisterRemoteReplica,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue


def changes(before: ReplicaList, now: ReplicaList) -> list[RegisterRemoteReplica | UnregisterRemoteReplica]:
    """What a list says that the one before it did not. Departures come first, so that their ids are free again.

    Only a list without a replica is its departure; a coordinator that is silent sends none. Replicas without a control
    address are none that a head attaches to.
    """
    old, new = _rows(before), _rows(now)
    gone = [UnregisterRemoteReplica(*key, reason="the coordinator no longer lists it") for key in old if key not in new]
    return gone + [row for key, row in new.items() if key not in old or _state(old[key]) != _state(row)]


class SessionListener:
    """`on_event` of `OmniCoordClientForHead`, or `on_update` of `OmniCoordClientForHub`. Called from one thread, any.

    Args:
        queue: the orchestrator's `rpc_async_queue`.
    """

    def __init__(self, queue: ThreadQueue[RpcMessage]) -> None:
        self._queue = queue
        self._last = ReplicaList(replicas=[], timestamp=0.0)

    def __call__(self, event: SessionEvent) -> None:
        """Queue it as it came; of a list, what has changed since the one before."""
        messages: list[RpcMessage] = []
        if isinstance(event, ReplicaList):
            messages += changes(self._last, event)
            self._last = event
        else:
            messages.append(event)
        # A head that has closed its queues hears nothing more: the coordinator sees it leave, and it lets its replicas
        # go without being told.
        with suppress(QueueClosedError):
            for message in messages:
                self._queue.force_put(message)


def _rows(replicas: ReplicaList) -> dict[ReplicaKey, RegisterRemoteReplica]:
    rows = [RegisterRemoteReplica(info, accepts=True) for info in replicas.replicas]
    rows += [RegisterRemoteReplica(info, accepts=False) for info in replicas.no_new_work]
    return {ReplicaKey.of(row.info): row for row in rows if row.info.control_addr}


def _state(row: RegisterRemoteReplica) -> tuple[bool, ReplicaStatus, int, str]:
    """What of a row matters to a head; the rest changes with every heartbeat."""
    return row.accepts, row.info.status, row.info.incarnation, row.info.control_addr
