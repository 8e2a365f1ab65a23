"""The response header `X-Omni-Replica`, which names the replicas of an answer."""

from collections.abc import Awaitable, Iterable
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ChosenReplicas

HEADER = "X-Omni-Replica"

_requests: ContextVar[list[ChosenReplicas] | None] = ContextVar("omni_requests", default=None)


def new_chosen_replicas() -> ChosenReplicas | None:
    """A list in which the orchestrator records where a request was sent; None outside of an HTTP answer.

    One answer may need several requests, each in its own asyncio task; tasks inherit the context variable.
    """
    requests = _requests.get()
    if requests is None:
        return None
    chosen_replicas: ChosenReplicas = []
    requests.append(chosen_replicas)
    return chosen_replicas


class ReplicaHeaderMiddleware:
    """Adds the header `X-Omni-Replica` with the answer's replicas, as `<stage>.<replica>`.

    An answer of several requests (`n`, several prompts) names every replica once, in the order of the requests; an
    answer of a pipeline names one replica per stage. A stream begins before vLLM sends a request to an engine, so it
    has no header. Instead, if the request has a header of this name, the stream ends with a comment of that content.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the replicas in the head of the response; of a stream in a last comment, if its client asked for it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        requests: list[ChosenReplicas] = []
        wants_comment = HEADER in Headers(scope=scope)
        is_event_stream = False

        def send_named(message: Message) -> Awaitable[None]:
            nonlocal is_event_stream
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_event_stream = headers.get("Content-Type", "").startswith("text/event-stream")
                if names := _names(requests):
                    headers[HEADER] = names
            elif (
                is_event_stream
                and wants_comment
                and not message.get("more_body", False)
                and (names := _names(requests))
            ):
                message["body"] = message.get("body", b"") + f": {HEADER}: {names}\n\n".encode()
            return send(message)

        token = _requests.set(requests)
        try:
            await self._app(scope, receive, send_named)
        finally:
            _requests.reset(token)


def _names(requests: Iterable[ChosenReplicas]) -> str:
    return ", ".join(
        dict.fromkeys(name for chosen_replicas in requests for name in _last_of_each_stage(chosen_replicas))
    )


def _last_of_each_stage(chosen_replicas: ChosenReplicas) -> Iterable[str]:
    return {name.partition(".")[0]: name for name, _ in chosen_replicas}.values()
