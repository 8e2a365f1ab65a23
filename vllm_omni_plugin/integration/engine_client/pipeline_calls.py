"""Calls of a pipeline while they run: how an HTTP handler's wishes reach the orchestrator, and what comes back."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import TypeVar

from vllm_omni_plugin.orchestrator.pipeline_call import CallEnded, PipelineCall, StageEvent

T = TypeVar("T")

Abort = Callable[[Sequence[str]], None]
"""Ends requests in all stages, by their ids."""

Put = Callable[[StageEvent | CallEnded], None]
"""See `PipelineCall.put`."""

_current: ContextVar["RunningCall | None"] = ContextVar("omni_call", default=None)


def submitted(request_id: str) -> PipelineCall | None:
    """A request is handed to the orchestrator: the call that it is made for, None for a plain request.

    One call may make several requests (`n`, several prompts), each in an asyncio task of its own: tasks inherit the
    context.
    """
    running = _current.get()
    if running is None:
        return None
    running.request_ids.append(request_id)
    return running.call


class RunningCall:
    """One call from the side of the loop that answers it.

    What comes back waits here until it is read. A client that reads slowly slows no stage down; what waits for it is
    bounded by what the stages may put out for one request.

    Args:
        wanted: makes what the orchestrator gets of where events go.
        abort: see `Abort`.

    Attributes:
        call: what the orchestrator gets.
        request_ids: the requests that have been made for it.
        news: set when there may be something to take.
    """

    def __init__(self, wanted: Callable[[Put], PipelineCall], abort: Abort) -> None:
        self.call = wanted(self._put)
        self.request_ids: list[str] = []
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self._events: deque[StageEvent | CallEnded] = deque()
        self._ended = 0

    @property
    def context(self) -> Context:
        """A copy of the current context, in which requests are made for this call."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    @property
    def over(self) -> bool:
        """Whether all its requests have ended and everything has been taken."""
        return not self._events and self._ended == len(self.request_ids)

    def take(self) -> StageEvent | CallEnded | None:
        """The next event, if there is one; each request ends with a `CallEnded`."""
        return self._events.popleft() if self._events else None

    def leave(self) -> None:
        """Nobody reads any more: whatever still runs for the call is aborted."""
        if self._ended < len(self.request_ids):
            self._abort(tuple(self.request_ids))

    def _put(self, event: StageEvent | CallEnded) -> None:
        # On the orchestrator's thread, which must not notice a loop that has ended: it answers nobody any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._received, event)

    def _received(self, event: StageEvent | CallEnded) -> None:
        self._ended += isinstance(event, CallEnded)
        self._events.append(event)
        self.news.set()


async def with_events(
    running: RunningCall, chunks: AsyncGenerator[T, None]
) -> AsyncGenerator[T | StageEvent | CallEnded, None]:
    """What vLLM says in answer to a call and what stages put out for it, each as it comes.

    Ends when both have ended. Closing it, or dropping it once it has begun, ends both.

    Args:
        running: the call.
        chunks: vLLM's; advanced in the call's context, since vLLM may submit its requests at the first of them.
    """
    loop, context = asyncio.get_running_loop(), running.context

    def advance() -> "asyncio.Task[T]":
        task = loop.create_task(_next_of(chunks), context=context)
        task.add_done_callback(lambda _: running.news.set())
        return task

    chunk: asyncio.Task[T] | None = advance()
    try:
        while chunk is not None or not running.over:
            # Events first: what was put out before vLLM's answer ended comes before its end.
            if (event := running.take()) is not None:
                yield event
            elif chunk is not None and chunk.done():
                try:
                    said = chunk.result()
                except StopAsyncIteration:
                    chunk = None
                    continue
                yield said
                chunk = advance()
            else:
                running.news.clear()
                await running.news.wait()
    finally:
        # First, since a server that gives up cancels whatever is awaited below.
        running.leave()
        if chunk is not None:
            chunk.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(chunk, return_exceptions=True)
        await chunks.aclose()


async def _next_of(chunks: AsyncGenerator[T, None]) -> T:
    return await anext(chunks)
