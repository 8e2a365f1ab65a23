"""What hands requests to the orchestrator and takes outputs from it: an interface, and its form for AsyncLLM."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue

_LATER_S = 0.02


class FrontEnd(ABC):
    """The front end, as the orchestrator sees it. For the orchestrator's loop, except where stated."""

    @abstractmethod
    async def serve(self, handle: Callable[[RequestMessage], None]) -> None:
        """Pass each message to `handle`, in order, until `close`. `handle` raises nothing."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """Messages that `serve` has not passed on. For any thread."""

    @abstractmethod
    def give(self, item: Any) -> None:
        """Pass on vLLM's `EngineCoreOutputs` or an event. Ignored after `close`."""

    @abstractmethod
    def give_later(self, item: Any) -> None:
        """Like `give`, for items that no client waits for: they may go together with the next one."""

    @abstractmethod
    def stop_waiting(self) -> None:
        """Cancel all timers. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End `serve`. Idempotent, from any thread."""


class QueuedFrontEnd(FrontEnd):
    """AsyncLLM, on the loop of another thread, behind two queues: one of `RequestMessage`, one of outputs to it."""

    def __init__(self) -> None:
        self.request_async_queue: ThreadQueue[RequestMessage] = ThreadQueue()
        self.output_async_queue: ThreadQueue[Any] = ThreadQueue()
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

    def give(self, item: Any) -> None:
        if self._timer is not None:
            self._give_waiting()
        with suppress(QueueClosedError):
            self.output_async_queue.put(item)

    def give_later(self, item: Any) -> None:
        """Within 20 ms. Each item wakes AsyncLLM's thread, which then takes Python's lock from this thread."""
        self._later.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LATER_S, self._give_waiting)

    def stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

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
