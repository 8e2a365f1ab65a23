"""The header `X-Omni-Replica`: which replicas an answer comes from."""

from collections.abc import Awaitable, Iterable
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import Dispatches

HEADER = "X-Omni-Replica"

_requests: ContextVar[list[Dispatches] | None] = ContextVar("omni_requests", default=None)


def new_dispatches() -> Dispatches | None:
    """Where the orchestrator notes the dispatches of a request of the current answer; None outside of any answer.

    One answer may take several requests, each made in an asyncio task of its own: tasks inherit the context.
    """
    requests = _requests.get()
    if requests is None:
        return None
    dispatches: Dispatches = []
    requests.append(dispatches)
    return dispatches


class ReplicaHeaderMiddleware:
    """Names the replicas that an answer comes from in its header `X-Omni-Replica`, as `<stage>.<replica>`.

    An answer of several requests (`n`, several prompts) names every replica once, in the order of the requests; a
    pipeline's names one of each stage. vLLM begins a stream of events before it asks an engine for anything, so such an
    answer has no header. If the request has a header of this name, the stream ends with a comment of the same content,
    which clients skip.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        requests: list[Dispatches] = []
        wants_comment = HEADER in Headers(scope=scope)
        of_events = False

        def send_named(message: Message) -> Awaitable[None]:
            nonlocal of_events
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                of_events = headers.get("Content-Type", "").startswith("text/event-stream")
                if names := _names(requests):
                    headers[HEADER] = names
            elif of_events and wants_comment and not message.get("more_body", False) and (names := _names(requests)):
                message["body"] = message.get("body", b"") + f": {HEADER}: {names}\n\n".encode()
            return send(message)

        token = _requests.set(requests)
        try:
            await self._app(scope, receive, send_named)
        finally:
            _requests.reset(token)


def _names(requests: Iterable[Dispatches]) -> str:
    return ", ".join(dict.fromkeys(name for dispatches in requests for name in _last_of_each_stage(dispatches)))


def _last_of_each_stage(dispatches: Dispatches) -> Iterable[str]:
    return {name.partition(".")[0]: name for name, _ in dispatches}.values()
