"""Waits on the HTTP server's event loop for an answer of the orchestrator."""

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

T = TypeVar("T")


async def result_of(reply: "Future[T]") -> T:
    """Return the reply's result, or raise its error: QueueClosedError if the orchestrator ended before it replied."""
    try:
        return await asyncio.wrap_future(reply)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise QueueClosedError("The server is about to end.") from None
