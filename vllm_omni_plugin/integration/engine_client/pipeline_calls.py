"""Calls of a pipeline while they run: from an HTTP handler to the orchestrator, and the events that come back."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from vllm_omni_plugin.admin.http_admission import current_response
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent

T = TypeVar("T")

Abort = Callable[[Sequence[str]], None]
"""Ends requests in all stages, by their ids."""

Put = Callable[[StageEvent | PipelineCallEnded], None]
"""See `PipelineCall.put`."""

_current: ContextVar["ActivePipelineCall | None"] = ContextVar("omni_call", default=None)


def register_request(request_id: str) -> PipelineCall | None:
    """Note that a request is submitted; returns the call that it belongs to, None for a plain request.

    One call may make several requests (`n`, several prompts), each in an asyncio task of its own: tasks inherit the
    context.
    """
    running = _current.get()
    if running is None:
        return None
    running.request_ids.append(request_id)
    return running.call


class ActivePipelineCall:
    """One call, on the loop of the HTTP handler.

    Args:
        make_call: makes what the orchestrator gets, given where its events go.
        abort: see `Abort`.

    Attributes:
        call: what the orchestrator gets.
        request_ids: the requests that have been made for it.
    """

    def __init__(self, make_call: Callable[[Put], PipelineCall], abort: Abort) -> None:
        self.call = make_call(self._put)
        self.request_ids: list[str] = []
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._ended = 0
        self._answer = current_response()

    async def run(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T | StageEvent | PipelineCallEnded, None]:
        """vLLM's answer to the call and the events of its stages, each as it comes.

        Ends when both have ended; each request ends with a `PipelineCallEnded`. Closing it, or dropping it once it has
        begun, ends both. What comes waits here until it is read, so a client that reads slowly slows no stage down.
        Its size is bounded by what the stages may put out for one request.

        Args:
            chunks: vLLM's; advanced in a context of the call's own, in which vLLM submits its requests.
        """
        context = copy_context()
        context.run(_current.set, self)
        answering = self._loop.create_task(self._take(chunks), context=context)
        answering.add_done_callback(lambda _: self._items.put_nowait(None))
        try:
            while not (answering.done() and self._ended == len(self.request_ids) and self._items.empty()):
                item = await self._items.get()
                if item is not None:
                    yield item
                else:
                    answering.result()
            # Its requests may have ended before the None that tells of its error came.
            answering.result()
        finally:
            # First, since a server that shuts down cancels the awaits below.
            if self._ended < len(self.request_ids):
                self._abort(tuple(self.request_ids))
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(answering, return_exceptions=True)
            await chunks.aclose()

    async def _take(self, chunks: AsyncGenerator[T, None]) -> None:
        async for chunk in chunks:
            self._items.put_nowait(chunk)

    def _put(self, event: StageEvent | PipelineCallEnded) -> None:
        # Called on the orchestrator's thread, which must not fail if this loop has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._received, event)

    def _received(self, event: StageEvent | PipelineCallEnded) -> None:
        if isinstance(event, PipelineCallEnded):
            self._ended += 1
            if self._answer is not None:
                # May come before `RequestFailed`.
                self._answer.refuse(event.error)
        self._items.put_nowait(event)
