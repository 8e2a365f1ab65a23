"""What hands requests to the orchestrator and takes outputs from it: an interface, and its form for AsyncLLM."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.orchestrator.pool.output_queue import OutputQueue, ReplicaReading
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue
from vllm_omni_plugin.replicas.client.stage_client import StageClient

MAX_QUEUED_REQUESTS = 4096
"""Requests in the queue above which AsyncLLM waits."""
MAX_QUEUED_OUTPUTS = 4096
"""Messages in the queue above which the replicas' sockets are not read."""


class FrontEnd(ABC):
    """The front end, as the orchestrator sees it. For the orchestrator's loop, except where stated.

    While the front end is slower than the replicas, their outputs stay in their sockets.
    """

    @abstractmethod
    async def serve(self, handle: Callable[[RequestMessage], None]) -> None:
        """Pass each message to `handle`, in order, until `close`. `handle` raises nothing."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """Messages that `serve` has not passed on. For any thread."""

    @abstractmethod
    def give(self, item: Any, size: int = 0) -> None:
        """Pass on vLLM's `EngineCoreOutputs`, received in so many bytes, or an event. Ignored after `close`."""

    @abstractmethod
    def give_later(self, item: Any) -> None:
        """Like `give`, for items that no client waits for: they may go together with the next one."""

    @abstractmethod
    def attached(self, client: StageClient) -> None:
        """A replica begins to serve."""

    @abstractmethod
    def stop_waiting(self) -> None:
        """Cancel all timers and tasks. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End `serve`. Idempotent, from any thread."""


class QueuedFrontEnd(FrontEnd):
    """AsyncLLM, on the loop of another thread, behind two bounded queues.

    Attributes:
        request_async_queue: messages about requests (`RequestMessage`).
        output_async_queue: vLLM's `EngineCoreOutputs`, and messages to AsyncLLM.
    """

    def __init__(
        self, stage_pools: Sequence[StagePool], max_buffered_bytes: int = OmniConfig().max_buffered_bytes
    ) -> None:
        self._reading = ReplicaReading(stage_pools)
        self.request_async_queue: ThreadQueue[RequestMessage] = ThreadQueue(MAX_QUEUED_REQUESTS)
        self.output_async_queue = OutputQueue(MAX_QUEUED_OUTPUTS, max_buffered_bytes, self._reading)

    async def serve(self, handle: Callable[[RequestMessage], None]) -> None:
        while True:
            try:
                batch = await self.request_async_queue.get_batch()
            except QueueClosedError:
                return
            for message in batch:
                handle(message)

    @property
    def queued(self) -> int:
        return len(self.request_async_queue)

    def give(self, item: Any, size: int = 0) -> None:
        self.output_async_queue.give(item, size)

    def give_later(self, item: Any) -> None:
        self.output_async_queue.give_later(item)

    def attached(self, client: StageClient) -> None:
        self._reading.attached(client)

    def stop_waiting(self) -> None:
        self.output_async_queue.stop_waiting()

    def close(self) -> None:
        self.request_async_queue.close()
        self.output_async_queue.close()
