"""The receipt of a request: a header of its answer that names the replicas which it went to."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.balancing.base import Decision
from vllm_omni_plugin.orchestrator.messages import Receipt

HEADER = "X-Omni-Replica"

_EARLY_PARTS = 2
"""Parts of a body that wait for a dispatch: as many as `/v1/responses` streams before it asks an engine. What comes
after them is something else, such as comments that keep a connection alive while no replica serves."""

_answer: ContextVar["_Answer | None"] = ContextVar("omni_answer", default=None)


def new_receipt() -> Receipt | None:
    """A receipt for a request to the engines, for the HTTP request that is being answered; None outside of any.

    One HTTP request may make several, each in an asyncio task of its own: tasks inherit the context.
    """
    answer = _answer.get()
    return None if answer is None else answer.new_receipt()


class ReceiptMiddleware:
    """Sets `X-Omni-Replica` on every answer that engines have a part in: `<stage>.<replica>`, as in the routes' ids.

    An answer of several requests (`n`, several prompts) names every replica once, in the order of the requests. vLLM
    begins a stream before it asks an engine for anything, so its start waits until the requests have been dispatched,
    which takes a moment, and not for any output. What is dispatched anew after that keeps the name. Of a pipeline, the
    answer names a replica of each stage that has been given work by then: a stream those of the first stages only.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        token = _answer.set(answer)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            _answer.reset(token)
            await answer.close()


class _TellingReceipt(list[tuple[str, Decision]]):
    """A receipt that says when something is written on it, which the orchestrator's thread does."""

    def __init__(self, on_dispatch: Callable[[], None]) -> None:
        super().__init__()
        self._on_dispatch = on_dispatch

    def append(self, dispatch: tuple[str, Decision]) -> None:
        super().append(dispatch)
        self._on_dispatch()


class _Answer:
    """One answer on its way: holds its start until it is known who gives it. Lives on the running loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._receipts: list[Receipt] = []
        self._held: deque[Message] = deque()
        self._begun = False
        self._sending = asyncio.Lock()
        self._beginning: asyncio.Task[None] | None = None

    def new_receipt(self) -> Receipt:
        """One more request is made for this answer."""
        self._receipts.append(_TellingReceipt(self._dispatched_elsewhere))
        return self._receipts[-1]

    def send(self, message: Message) -> Awaitable[None]:
        """The application says something: pass it on, or hold it."""
        # A stream has a message for each token: nothing of this class stands in the way of those.
        if self._begun and not self._held and not self._sending.locked():
            return self._send(message)
        return self._hold(message)

    async def _hold(self, message: Message) -> None:
        self._held.append(message)
        if self._begun or self._may_begin():
            self._begun = True
            await self._flush()

    async def close(self) -> None:
        """The application has ended; what it has begun is sent, what it has not is not."""
        if self._beginning is not None:
            await self._beginning

    def _dispatched_elsewhere(self) -> None:
        # Nothing waits in an answer that is no stream; what is held after this look finds the dispatch written.
        if not self._held:
            return
        # A loop that has ended answers nobody any more, and the caller must not notice.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._dispatched)

    def _dispatched(self) -> None:
        if not self._begun and self._held and all(self._receipts):
            self._begun = True
            self._beginning = self._loop.create_task(self._flush(), name="omni-begin-answer")

    def _may_begin(self) -> bool:
        parts = len(self._held) - 1
        dispatched = bool(self._receipts) and all(self._receipts)
        whole = parts > 0 and not self._held[-1].get("more_body", False)
        return dispatched or whole or parts > _EARLY_PARTS

    async def _flush(self) -> None:
        async with self._sending:
            while self._held:
                message = self._held.popleft()
                if message["type"] == "http.response.start":
                    self._name_replicas(message)
                await self._send(message)

    def _name_replicas(self, start: Message) -> None:
        replicas = dict.fromkeys(name for receipt in self._receipts for name in _last_of_each_stage(receipt))
        if replicas:
            MutableHeaders(scope=start)[HEADER] = ", ".join(replicas)


def _last_of_each_stage(receipt: Receipt) -> Iterable[str]:
    return {name.partition(".")[0]: name for name, _ in receipt}.values()
