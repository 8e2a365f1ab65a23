"""The receipt of a request: a header of its answer that names the replica which gave it."""

from collections.abc import Sequence
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.orchestrator.messages import Receipt

HEADER = "X-Omni-Replica"

_EARLY_PARTS = 2
"""Parts of a body that wait for a dispatch: as many as `/v1/responses` streams before it asks an engine. What comes
after them is something else, such as comments that keep a connection alive while no replica serves."""

_receipts: ContextVar[list[Receipt] | None] = ContextVar("omni_receipts", default=None)


def new_receipt() -> Receipt | None:
    """A receipt for a request to the engines, for the HTTP request that is being answered; None outside of any.

    One HTTP request may make several, each in an asyncio task of its own: tasks inherit the context.
    """
    receipts = _receipts.get()
    if receipts is None:
        return None
    receipt: Receipt = []
    receipts.append(receipt)
    return receipt


class ReceiptMiddleware:
    """Sets `X-Omni-Replica` on every answer that engines had a part in: `<stage>.<replica>`, as in the routes' ids.

    An answer of several requests (`n`, several prompts) names every replica once, in the order of the requests. An
    answer's start goes out with the first part of its body instead of before: only then is known who gives it, after
    whatever moves. Events that a stream sends before it asks an engine for anything wait as well.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        receipts: list[Receipt] = []
        token = _receipts.set(receipts)
        try:
            await self._app(scope, receive, _with_header(send, receipts))
        finally:
            _receipts.reset(token)


def _with_header(send: Send, receipts: Sequence[Receipt]) -> Send:
    held: list[Message] = []
    begun = False

    async def forward(message: Message) -> None:
        nonlocal begun
        if begun:
            await send(message)
            return
        held.append(message)
        # The last dispatch before any output is the one that the first output came from.
        replicas = dict.fromkeys(receipt[-1][0] for receipt in receipts if receipt)
        if _may_begin(held, bool(replicas)):
            begun = True
            if replicas:
                MutableHeaders(scope=held[0])[HEADER] = ", ".join(replicas)
            for message in held:
                await send(message)

    return forward


def _may_begin(held: Sequence[Message], dispatched: bool) -> bool:
    parts = len(held) - 1
    whole = not held[-1].get("more_body", False)
    return parts > 0 and (dispatched or whole or parts > _EARLY_PARTS)
