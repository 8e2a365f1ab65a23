"""What a head hears of the coordinator, as messages for its orchestrator."""

from contextlib import suppress

from vllm_omni_plugin.coordinator import ReplicaList, SessionEvent
from vllm_omni_plugin.orchestrator.pool.list_changes import ReplicaListWatcher
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RpcMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue


class SessionListener:
    """`on_event` of `OmniCoordClientForHead`. Called from one thread, any.

    Args:
        queue: the orchestrator's `rpc_async_queue`.
    """

    def __init__(self, queue: ThreadQueue[RpcMessage]) -> None:
        self._queue = queue
        self._watcher = ReplicaListWatcher(queue)

    def __call__(self, event: SessionEvent) -> None:
        """Queue it as it came; of a list, what has changed since the one before."""
        if isinstance(event, ReplicaList):
            self._watcher.update(event)
            return
        # A head that has closed its queues hears nothing more, and the coordinator sees it leave.
        with suppress(QueueClosedError):
            self._queue.force_put(event)
