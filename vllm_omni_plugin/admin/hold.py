"""Hold, then refuse: a middleware that lets requests wait for a replica before their answer begins.

Later would be too late for a stream: its status line says 200 by then, and a refusal could only be an error event.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.errors import SHUTTING_DOWN, NoReplicaError, OmniError, RequestRefusedError
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator

MAX_WAITING = 1024
"""Requests that may wait at once; each keeps a connection and its body. More are refused at once."""
RETRY_AFTER_S = 5
"""What a refused client is told: about the time in which a replica that died comes back or a spare one joins."""
RATE_LIMITED = "rate_limit_exceeded"
"""OpenAI's word for 429, the `type` of such an error."""
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this status; it keeps a client that left out of the server errors in metrics and logs."""


class Hold:
    """Where requests wait while the fleet cannot serve: bounded in number and time. Lives on the server's event loop.

    Args:
        orchestrator: whose `can_serve` is waited for.
        until_serving: returns once that holds, woken by the orchestrator.
        replica_wait: seconds that one request may wait; 0 refuses at once.
        why_closed: why all are refused now, because the server was told to end or is drained; "" if they are not.
        until_ending: returns once the server was told to end.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        until_serving: Callable[[], Coroutine[Any, Any, None]],
        replica_wait: float,
        why_closed: Callable[[], str],
        until_ending: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._orchestrator = orchestrator
        self._until_serving = until_serving
        self._replica_wait = replica_wait
        self._why_closed = why_closed
        self._until_ending = until_ending

    @property
    def is_needed(self) -> bool:
        """Whether a request that comes now has to wait, or is refused."""
        return bool(self._why_closed()) or not self._orchestrator.can_serve

    async def wait(self, disconnected: Callable[[], Coroutine[Any, Any, None]], has_key: bool) -> bool:
        """Wait until the fleet can serve or the client is gone.

        Args:
            disconnected: returns when the client is gone; cancelled when that no longer matters.
            has_key: whether the request carries a valid API key, or the server has none; without one it may not wait.

        Returns:
            Whether the client is still there.

        Raises:
            NoReplicaError: the time is over, too many wait already, the server ends or is drained, or the request may
                not wait.
        """
        if reason := self._why_closed():
            raise self._closed(reason)
        if not has_key:
            raise self._refusal("a request without a valid API key does not wait")
        metrics = self._orchestrator.metrics
        if metrics.waiting >= MAX_WAITING:
            raise self._refusal(f"{MAX_WAITING} requests wait already")
        waits = (disconnected(), self._until_serving(), self._until_ending())
        gone, served, ending = tasks = [asyncio.create_task(wait, name="omni-waiting") for wait in waits]
        metrics.waiting += 1
        try:
            await asyncio.wait(tasks, timeout=self._replica_wait, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise self._closed(SHUTTING_DOWN)
            if not gone.done() and not served.done():
                raise self._refusal(f"waited {self._replica_wait:g} s")
            return not gone.done()
        finally:
            metrics.waiting -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _closed(self, reason: str) -> NoReplicaError:
        self._orchestrator.metrics.refused_before_accept += 1
        return NoReplicaError(reason)

    def _refusal(self, reason: str) -> NoReplicaError:
        self._orchestrator.metrics.refused_before_accept += 1
        pools = self._orchestrator.needed_pools
        closed = next((pool for pool in pools if not pool.serving), pools[0])
        return NoReplicaError(f"{closed.unavailable()} ({reason})")


class HoldMiddleware:
    """Lets a POST to an inference path wait in `app.state.omni_hold`; everything else passes at once.

    A refusal is a 503 with `Retry-After`, in the shape of OpenAI's errors. Any other 503 of these paths gets the same
    header: vLLM's error handlers set none.

    Args:
        paths: the inference paths, below the root path.
        has_key: whether headers have a valid API key, or the server wants none. vLLM does not check the keys of all
            paths, and requests without one must not take the places of those with one.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str], has_key: Callable[[Headers], bool]) -> None:
        self._app = app
        self._paths = paths
        self._has_key = has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hold: Hold | None = getattr(scope["app"].state, "omni_hold", None) if is_post_to(self._paths, scope) else None
        if hold is None:
            await self._app(scope, receive, send)
        elif not hold.is_needed:
            await self._app(scope, receive, _with_retry_after(send))
        else:
            await self._wait(hold, scope, receive, _with_retry_after(send))

    async def _wait(self, hold: Hold, scope: Scope, receive: Receive, send: Send) -> None:
        ahead = ReadAhead(receive)
        try:
            if await hold.wait(ahead.until_disconnect, self._has_key(Headers(scope=scope))):
                await self._app(scope, ahead.receive, send)
            else:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        except NoReplicaError as error:
            await refusal(error)(scope, receive, send)
        finally:
            ahead.close()


class ReadAhead:
    """Reads a request before the application does, since a disconnect is seen only behind the body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        # Outlives the wait: a message that comes as the wait ends still goes to the application.
        self._pending: asyncio.Future[Message] | None = None

    async def until_disconnect(self) -> None:
        """Keep what comes; return when the client is gone."""
        while not self._messages or self._messages[-1]["type"] != "http.disconnect":
            self._pending = asyncio.ensure_future(self._receive())
            self._messages.append(await asyncio.shield(self._pending))
            self._pending = None

    async def body(self) -> bytes | None:
        """Read the whole body and keep it, too; None if the client is gone."""
        while not self._messages or self._messages[-1].get("more_body", False):
            self._messages.append(await self._receive())
        if self._messages[-1]["type"] == "http.disconnect":
            return None
        return b"".join(message.get("body", b"") for message in self._messages)

    async def receive(self) -> Message:
        """What the application gets: first what was read ahead, then the rest."""
        if self._messages:
            return self._messages.popleft()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return await pending
        return await self._receive()

    def close(self) -> None:
        """The request is over."""
        if self._pending is not None:
            self._pending.cancel()


def is_post_to(paths: Collection[str], scope: Scope) -> bool:
    """Whether a request is a POST to one of these paths, which are below the server's root path."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in paths


def refusal(error: OmniError) -> Response:
    """The 503, or what a `RequestRefusedError` has for a status, that says why, in the shape of OpenAI's errors."""
    status, retry_after_s = HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER_S
    if isinstance(error, RequestRefusedError):
        status, retry_after_s = HTTPStatus(error.status), error.retry_after_s
    kind = RATE_LIMITED if status is HTTPStatus.TOO_MANY_REQUESTS else status.phrase
    return error_response(str(error), status, kind, {"Retry-After": str(retry_after_s)})


def error_response(message: str, status: HTTPStatus, kind: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the shape of OpenAI's, as vLLM has it."""
    details = {"message": message, "type": kind, "param": None, "code": status.value}
    return JSONResponse({"error": details}, status, headers)


def _with_retry_after(send: Send) -> Send:
    def forward(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
            MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_AFTER_S))
        return send(message)

    return forward
