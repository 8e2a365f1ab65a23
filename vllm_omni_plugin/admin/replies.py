"""Waiting, on the HTTP server's event loop, for what the orchestrator answers."""

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

T = TypeVar("T")


async def result_of(reply: "Future[T]") -> T:
    """The result of a message's reply, or its error.

    Raises:
        QueueClosedError: the orchestrator ended with the message open. To who asks that is no cancellation.
    """
    try:
        return await asyncio.wrap_future(reply)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise QueueClosedError("The server is about to end.") from None
