"""What hands requests to the orchestrator and takes outputs from it: an interface, and its form for AsyncLLM."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.orchestrator.pool.replica_reading import ReplicaReading
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue
from vllm_omni_plugin.replicas.client.stage_client import StageClient

MAX_QUEUED_REQUESTS = 4096
"""Requests in the queue above which AsyncLLM waits."""
MAX_QUEUED_OUTPUTS = 4096
"""Messages in the queue above which the replicas' sockets are not read."""
_LATER_S = 0.02


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

    Args:
        max_buffered_bytes: of outputs that AsyncLLM has not taken, as they were received, at which no more are read.

    Attributes:
        request_async_queue: messages about requests (`RequestMessage`).
        output_async_queue: vLLM's `EngineCoreOutputs`, and messages to AsyncLLM.
    """

    def __init__(
        self, stage_pools: Sequence[StagePool], max_buffered_bytes: int = OmniConfig().max_buffered_bytes
    ) -> None:
        self.request_async_queue: ThreadQueue[RequestMessage] = ThreadQueue(MAX_QUEUED_REQUESTS)
        self.output_async_queue: ThreadQueue[Any] = ThreadQueue(MAX_QUEUED_OUTPUTS, max_buffered_bytes)
        self._reading = ReplicaReading(stage_pools)
        self._throttle: asyncio.Task[None] | None = None
        self._later: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

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
        if self._timer is not None:
            self._give_waiting()
        try:
            is_full = self.output_async_queue.force_put(item, size)
        except QueueClosedError:
            return
        if is_full and self._throttle is None:
            self._throttle = asyncio.get_running_loop().create_task(self._wait_for_reader(), name="omni-throttle")

    def give_later(self, item: Any) -> None:
        """Within 20 ms. Each item wakes AsyncLLM's thread, which then takes Python's lock from this thread."""
        self._later.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LATER_S, self._give_waiting)

    def attached(self, client: StageClient) -> None:
        self._reading.attached(client)

    def stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._throttle is not None:
            self._throttle.cancel()

    def close(self) -> None:
        self.request_async_queue.close()
        self.output_async_queue.close()

    def _give_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._later = self._later, []
        for item in waiting:
            self.give(item)

    async def _wait_for_reader(self) -> None:
        try:
            self._reading.pause()
            await self.output_async_queue.wait_for_room()
        except QueueClosedError:
            return
        finally:
            self._throttle = None
        self._reading.resume()
