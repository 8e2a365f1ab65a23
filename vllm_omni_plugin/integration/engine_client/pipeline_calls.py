"""Calls of a pipeline while they run: from an HTTP handler to the orchestrator, and the events that come back."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import TypeVar

from vllm_omni_plugin.orchestrator.requests.pipeline_call import CallEnded, PipelineCall, StageEvent

T = TypeVar("T")

Abort = Callable[[Sequence[str]], None]
"""Ends requests in all stages, by their ids."""

Put = Callable[[StageEvent | CallEnded], None]
"""See `PipelineCall.put`."""

_current: ContextVar["RunningCall | None"] = ContextVar("omni_call", default=None)


def submitted(request_id: str) -> PipelineCall | None:
    """Note that a request is submitted; returns the call that it belongs to, None for a plain request.

    One call may make several requests (`n`, several prompts), each in an asyncio task of its own: tasks inherit the
    context.
    """
    running = _current.get()
    if running is None:
        return None
    running.request_ids.append(request_id)
    return running.call


class RunningCall:
    """One call, on the loop of the HTTP handler.

    Events wait here until they are read, so a client that reads slowly slows no stage down. Their size is bounded by
    what the stages may put out for one request.

    Args:
        make_call: makes what the orchestrator gets, given where its events go.
        abort: see `Abort`.

    Attributes:
        call: what the orchestrator gets.
        request_ids: the requests that have been made for it.
        changed: set when there may be an event to take.
    """

    def __init__(self, make_call: Callable[[Put], PipelineCall], abort: Abort) -> None:
        self.call = make_call(self._put)
        self.request_ids: list[str] = []
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self._events: deque[StageEvent | CallEnded] = deque()
        self._ended = 0

    @property
    def context(self) -> Context:
        """A copy of the current context, in which requests are made for this call."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    @property
    def is_complete(self) -> bool:
        """Whether all its requests have ended and everything has been taken."""
        return not self._events and self._ended == len(self.request_ids)

    def take(self) -> StageEvent | CallEnded | None:
        """The next event, if there is one; each request ends with a `CallEnded`."""
        return self._events.popleft() if self._events else None

    def abort_rest(self) -> None:
        """Abort what still runs for the call, since nobody reads its events any more."""
        if self._ended < len(self.request_ids):
            self._abort(tuple(self.request_ids))

    def _put(self, event: StageEvent | CallEnded) -> None:
        # Called on the orchestrator's thread, which must not fail if this loop has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._received, event)

    def _received(self, event: StageEvent | CallEnded) -> None:
        self._ended += isinstance(event, CallEnded)
        self._events.append(event)
        self.changed.set()


async def with_events(
    running: RunningCall, chunks: AsyncGenerator[T, None]
) -> AsyncGenerator[T | StageEvent | CallEnded, None]:
    """vLLM's answer to a call and the events of its stages, each as it comes.

    Ends when both have ended. Closing it, or dropping it once it has begun, ends both.

    Args:
        running: the call.
        chunks: vLLM's; advanced in the call's context, since vLLM may submit its requests at the first of them.
    """
    loop, context = asyncio.get_running_loop(), running.context

    def advance() -> "asyncio.Task[T]":
        task = loop.create_task(_next_of(chunks), context=context)
        task.add_done_callback(lambda _: running.changed.set())
        return task

    chunk: asyncio.Task[T] | None = advance()
    try:
        while chunk is not None or not running.is_complete:
            # Events first: what was put out before vLLM's answer ended comes before its end.
            if (event := running.take()) is not None:
                yield event
            elif chunk is not None and chunk.done():
                try:
                    item = chunk.result()
                except StopAsyncIteration:
                    chunk = None
                    continue
                yield item
                chunk = advance()
            else:
                running.changed.clear()
                await running.changed.wait()
    finally:
        # First, since a server that shuts down cancels the awaits below.
        running.abort_rest()
        if chunk is not None:
            chunk.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(chunk, return_exceptions=True)
        await chunks.aclose()


async def _next_of(chunks: AsyncGenerator[T, None]) -> T:
    return await anext(chunks)
