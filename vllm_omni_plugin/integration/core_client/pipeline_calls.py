"""HTTP calls to a pipeline: pass them to the orchestrator, and merge vLLM's response with the events of stages."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from vllm_omni_plugin.admin.http_admission import current_response
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent
from vllm_omni_plugin.other_loop import call_on

T = TypeVar("T")

Abort = Callable[[Sequence[str]], None]
"""Aborts requests in all stages, by their ids."""

Put = Callable[[StageEvent | PipelineCallEnded], None]
"""See `PipelineCall.put`."""

_current: ContextVar["ActivePipelineCall | None"] = ContextVar("omni_call", default=None)


def register_request(request_id: str) -> PipelineCall | None:
    """Add a request to the call of the current context, and return the call; None for a plain request.

    One call may make several requests (`n`, several prompts), each in its own asyncio task; tasks inherit the context.
    """
    running = _current.get()
    if running is None:
        return None
    running.request_ids.append(request_id)
    return running.call


class ActivePipelineCall:
    """One HTTP call to a pipeline, on the handler's loop, with the `request_ids` that vLLM has made for it so far."""

    def __init__(self, make_call: Callable[[Put], PipelineCall], abort: Abort) -> None:
        self.call = make_call(self._put)
        self.request_ids: list[str] = []
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._ended = 0
        self._answer = current_response()

    async def run(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T | StageEvent | PipelineCallEnded, None]:
        """Merge the chunks of vLLM's response and the events of the stages, each as it comes.

        Ends when both have ended; closing it aborts both. Items are buffered, so that a slow client does not slow down
        stages. What stages can put out for one call bounds the buffer. Chunks are made in a context of their own, in
        which vLLM submits the requests.
        """
        context = copy_context()
        context.run(_current.set, self)
        response = self._loop.create_task(self._put_chunks(chunks), context=context)
        response.add_done_callback(lambda _: self._items.put_nowait(None))
        try:
            while not (response.done() and self._ended == len(self.request_ids) and self._items.empty()):
                item = await self._items.get()
                if item is not None:
                    yield item
                else:
                    response.result()
            # The requests may have ended before the None for an error of the response came.
            response.result()
        finally:
            # First, because a server that shuts down cancels the awaits below.
            if self._ended < len(self.request_ids):
                self._abort(tuple(self.request_ids))
            response.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(response, return_exceptions=True)
            await chunks.aclose()

    async def _put_chunks(self, chunks: AsyncGenerator[T, None]) -> None:
        async for chunk in chunks:
            self._items.put_nowait(chunk)

    def _put(self, event: StageEvent | PipelineCallEnded) -> None:
        # Called on the orchestrator's thread.
        call_on(self._loop, self._received, event)

    def _received(self, event: StageEvent | PipelineCallEnded) -> None:
        if isinstance(event, PipelineCallEnded):
            self._ended += 1
            if self._answer is not None:
                # This event may come before `RequestFailed`.
                self._answer.refuse(event.error)
        self._items.put_nowait(event)
