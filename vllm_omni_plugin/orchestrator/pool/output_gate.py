"""The way to AsyncLLM, and what happens to it when AsyncLLM falls behind."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue
from vllm_omni_plugin.replicas.client.stage_client import StageClient

_LATER_S = 0.02


class OutputGate:
    """Puts items into the output queue; while that is full, the replicas' outputs stay in their sockets.

    Args:
        queue: read by AsyncLLM's side.
        stage_pools: whose replicas are left unread.
    """

    def __init__(self, queue: ThreadQueue[Any], stage_pools: Sequence[StagePool]) -> None:
        self._queue = queue
        self._pools = stage_pools
        self._throttle: asyncio.Task[None] | None = None
        self._later: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Any) -> None:
        """Hand one item over, whatever the length of the queue. Lost once the queue is closed."""
        if self._timer is not None:
            self._put_waiting()
        try:
            is_full = self._queue.force_put(item)
        except QueueClosedError:
            return
        if is_full and self._throttle is None:
            self._throttle = asyncio.get_running_loop().create_task(self._wait_for_reader(), name="omni-throttle")

    def put_later(self, item: Any) -> None:
        """Hand an item over with the next one, and within 20 ms, in order. For what no client waits for.

        Every item by itself wakes AsyncLLM's thread, which then has Python's lock while a next stage wants it.
        """
        self._later.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LATER_S, self._put_waiting)

    def _put_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._later = self._later, []
        for item in waiting:
            self.put(item)

    def attached(self, client: StageClient) -> None:
        """A replica begins to serve: it waits with the others."""
        if self._throttle is not None:
            client.pause_reading()

    def close(self) -> None:
        """Stop waiting, for the reader and for the next item. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._throttle is not None:
            self._throttle.cancel()

    async def _wait_for_reader(self) -> None:
        try:
            self._for_all(StageClient.pause_reading)
            await self._queue.wait_for_room()
        except QueueClosedError:
            return
        finally:
            self._throttle = None
        self._for_all(StageClient.resume_reading)

    def _for_all(self, do: Callable[[StageClient], None]) -> None:
        for client in list(self._clients()):
            do(client)

    def _clients(self) -> Iterator[StageClient]:
        for pool in self._pools:
            for member in pool.members:
                if member.client is not None:
                    yield member.client
