"""The queue of outputs for AsyncLLM, with back-pressure."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue
from vllm_omni_plugin.replicas.client.stage_client import StageClient

_LATER_S = 0.02


class ReplicaReading:
    """Pauses and resumes the reading of all replicas together. Lives on the orchestrator's loop.

    Attributes:
        paused: whether nothing is read.
    """

    def __init__(self, stage_pools: Sequence[StagePool]) -> None:
        self._pools = stage_pools
        self.paused = False

    def pause(self) -> None:
        self.paused = True
        for client in self._clients():
            client.pause_reading()

    def resume(self) -> None:
        self.paused = False
        for client in self._clients():
            client.resume_reading()

    def attached(self, client: StageClient) -> None:
        """A replica begins to serve: during a pause, it is not read either."""
        if self.paused:
            client.pause_reading()

    def _clients(self) -> list[StageClient]:
        return [m.client for pool in self._pools for m in pool.members if m.client is not None]


class OutputQueue(ThreadQueue[Any]):
    """Outputs for AsyncLLM's thread. While the queue is full, replicas' outputs stay in their sockets.

    All methods but those of `ThreadQueue` are for the orchestrator's loop.

    Args:
        maxsize: messages that AsyncLLM has not taken, at which reading stops.
        max_bytes: the size of these messages, as they were received, at which reading stops.
        reading: of the replicas.
    """

    def __init__(self, maxsize: int, max_bytes: float, reading: ReplicaReading) -> None:
        super().__init__(maxsize, max_bytes)
        self._reading = reading
        self._throttle: asyncio.Task[None] | None = None
        self._later: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

    def give(self, item: Any, size: int = 0) -> None:
        """Add an item of so many bytes, even to a full queue. Ignored once the queue is closed."""
        if self._timer is not None:
            self._give_waiting()
        try:
            is_full = self.force_put(item, size)
        except QueueClosedError:
            return
        if is_full and self._throttle is None:
            self._throttle = asyncio.get_running_loop().create_task(self._wait_for_reader(), name="omni-throttle")

    def give_later(self, item: Any) -> None:
        """Add an item with the next one, within 20 ms at most, in order. For items that no client waits for.

        Each item wakes AsyncLLM's thread, which then takes Python's lock from this thread.
        """
        self._later.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LATER_S, self._give_waiting)

    def _give_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._later = self._later, []
        for item in waiting:
            self.give(item)

    def stop_waiting(self) -> None:
        """Cancel all timers and tasks. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._throttle is not None:
            self._throttle.cancel()

    async def _wait_for_reader(self) -> None:
        try:
            self._reading.pause()
            await self.wait_for_room()
        except QueueClosedError:
            return
        finally:
            self._throttle = None
        self._reading.resume()
