"""A middleware that holds requests until a replica serves, or refuses them, before the response starts.

After a stream has started its status is 200, and a refusal could only be an error event.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import SHUTTING_DOWN, NoReplicaError, OmniError, RequestRefusedError
from vllm_omni_plugin.orchestrator import Orchestrator

MAX_WAITING = 1024
"""Requests that may be held at a time; each keeps a connection and its body. Further ones are refused at once."""
LONGEST_HOLD = "omni_longest_hold_s"
"""Key of a request's scope: for how many seconds its deadline allows it to be held."""
RETRY_AFTER_S = 5
"""`Retry-After` of a refusal: about the time in which a crashed replica restarts or a spare one joins."""
RATE_LIMITED = "rate_limit_exceeded"
"""OpenAI's error `type` for 429."""
_HEALTH_PATHS = frozenset({"/health", "/ping"})
CLIENT_CLOSED_REQUEST = 499
"""No client reads this status; it keeps clients that disconnected out of the server errors in metrics and logs."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Holds requests while the fleet cannot serve, in bounded number and time. Lives on the server's event loop.

    Attributes:
        until_serving: returns once `orchestrator.can_serve` is true; the orchestrator wakes it.
        replica_wait: seconds for which a request may be held; 0 refuses at once.
        closed_reason: why all requests are refused, because the server shuts down or is drained; "" if they are not.
        until_ending: returns once the server shuts down.
        max_bytes: of the bodies of held requests; a request that needs more is refused.
    """

    orchestrator: Orchestrator
    until_serving: Callable[[], Coroutine[Any, Any, None]]
    replica_wait: float
    closed_reason: Callable[[], str]
    until_ending: Callable[[], Coroutine[Any, Any, None]]
    max_bytes: int = OmniConfig().max_buffered_bytes

    @property
    def reason(self) -> str:
        return self.closed_reason() or str(unavailable(self.orchestrator))

    @property
    def is_needed(self) -> bool:
        """Whether a request that comes now must be held or refused."""
        return bool(self.closed_reason()) or not self.orchestrator.can_serve

    async def wait(
        self, disconnected: Callable[[], Coroutine[Any, Any, None]], has_key: bool, at_most: float = math.inf
    ) -> bool:
        """Wait until the fleet can serve or the client has disconnected; returns whether it is still connected.

        `disconnected` returns when the client has disconnected, or raises an error that ends the wait; it is cancelled
        when the wait ends. Raises NoReplicaError if the time is up, too many requests or bytes wait, the server takes
        no requests, or this one needs a key and has no valid one.
        """
        if reason := self.closed_reason():
            raise self._refuse(reason)
        if not has_key:
            raise self._refuse_without_replica("a request without a valid API key does not wait")
        metrics = self.orchestrator.metrics
        if metrics.held_before_accept >= MAX_WAITING:
            raise self._refuse_without_replica(f"{MAX_WAITING} requests wait already")
        longest = min(self.replica_wait, at_most)
        waits = (disconnected(), self.until_serving(), self.until_ending())
        gone, served, ending = tasks = [asyncio.create_task(wait, name="omni-waiting") for wait in waits]
        metrics.held_before_accept += 1
        try:
            await asyncio.wait(tasks, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise self._refuse(SHUTTING_DOWN)
            if not gone.done() and not served.done():
                raise self._refuse_without_replica(f"the request waited {round(longest, 2):g} s")
            if gone.done():
                gone.result()
            return not gone.done()
        finally:
            metrics.held_before_accept -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def keep(self, size: int) -> None:
        """Count bytes of a held body. Raises `NoReplicaError` if held requests have too many; `release` them anyway."""
        metrics = self.orchestrator.metrics
        metrics.held_bytes_before_accept += size
        if metrics.held_bytes_before_accept > self.max_bytes:
            limit = f"{self.max_bytes // 2**20} MiB, see --omni-max-buffered-size"
            raise self._refuse_without_replica(f"the bodies of waiting requests have more than {limit}")

    def release(self, size: int) -> None:
        self.orchestrator.metrics.held_bytes_before_accept -= size

    def _refuse_without_replica(self, reason: str) -> NoReplicaError:
        return self._refuse(str(unavailable(self.orchestrator, reason)))

    def _refuse(self, message: str) -> NoReplicaError:
        self.orchestrator.metrics.requests_failed_before_accept += 1
        return NoReplicaError(message)


def unavailable(orchestrator: Orchestrator, why: str = "") -> NoReplicaError:
    """The 503's error: of the first needed stage without a serving replica."""
    pools = orchestrator.needed_pools
    return next((pool for pool in pools if not pool.serving), pools[0]).unavailable(why)


class HoldMiddleware:
    """Holds POST requests to inference paths by `app.state.omni_hold`; says why a health check fails.

    A refusal is a 503 with `Retry-After` in the format of OpenAI's errors. Any other 503 of the app gets the
    header, too: vLLM's error handlers set none, and drop that of an `HTTPException`. `paths` are below the root
    path. `has_key`, also true if the server needs no key, is asked since vLLM does not check the keys of all paths, and
    requests without a key must not take the places of requests with one.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str], has_key: Callable[[Headers], bool]) -> None:
        self._app = app
        self._paths = paths
        self._has_key = has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse `/health` and let inference wait while the head cannot serve; else pass the request on."""
        is_health = is_request("GET", _HEALTH_PATHS, scope)
        is_held = is_health or is_request("POST", self._paths, scope)
        hold: Hold | None = getattr(scope["app"].state, "omni_hold", None) if is_held else None
        if hold is None:
            await self._app(scope, receive, _with_retry_after(send))
        elif is_health and hold.is_needed:
            await PlainTextResponse(f"{hold.reason}\n", HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)
        elif not hold.is_needed:
            await self._app(scope, receive, _with_retry_after(send))
        else:
            await self._wait(hold, scope, receive, _with_retry_after(send))

    async def _wait(self, hold: Hold, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on once a replica serves; 503 after the wait's end, 499 if its client has left."""
        request = BufferedRequest(receive)
        try:
            try:
                connected = await hold.wait(
                    lambda: request.until_disconnect(hold.keep),
                    self._has_key(Headers(scope=scope)),
                    scope.get(LONGEST_HOLD, math.inf),
                )
            finally:
                hold.release(request.kept)
            if connected:
                await self._app(scope, request.receive, send)
            else:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        except NoReplicaError as error:
            await refusal_response(error)(scope, receive, send)
        finally:
            request.close()


class BufferedRequest:
    """Reads a request before the application does, because a disconnect is seen only after the body.

    `kept` counts the bytes of the body that `until_disconnect` has buffered.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        self.kept = 0
        # Kept after the wait: a message that comes as the wait ends must still reach the application.
        self._pending: asyncio.Future[Message] | None = None

    async def until_disconnect(self, keep: Callable[[int], None]) -> None:
        """Buffer messages until the client has disconnected. `keep` gets the size of each part, and may raise."""
        while not self._messages or self._messages[-1]["type"] != "http.disconnect":
            self._pending = asyncio.ensure_future(self._receive())
            message = await asyncio.shield(self._pending)
            self._pending = None
            self._messages.append(message)
            size = len(message.get("body", b""))
            self.kept += size
            keep(size)

    async def body(self) -> bytes | None:
        """The whole body, buffered; None if the client has disconnected."""
        while not self._messages or self._messages[-1].get("more_body", False):
            self._messages.append(await self._receive())
        if self._messages[-1]["type"] == "http.disconnect":
            return None
        return b"".join(message.get("body", b"") for message in self._messages)

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.popleft()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return await pending
        return await self._receive()

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


def is_request(method: str, paths: Collection[str], scope: Scope) -> bool:
    """Whether a request has this method and one of these paths below the server's root path."""
    if scope["type"] != "http" or scope["method"] != method:
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in paths


def refusal_response(error: OmniError) -> Response:
    """The response to a refused request in OpenAI's format: 503, or the status of a `RequestRefusedError`."""
    status, retry_after_s = HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER_S
    if isinstance(error, RequestRefusedError):
        status, retry_after_s = HTTPStatus(error.status), error.retry_after_s
    kind = RATE_LIMITED if status is HTTPStatus.TOO_MANY_REQUESTS else status.phrase
    return error_response(str(error), status, kind, {"Retry-After": str(retry_after_s)})


def error_response(message: str, status: HTTPStatus, kind: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in OpenAI's format, as vLLM sends it."""
    details = {"message": message, "type": kind, "param": None, "code": status.value}
    return JSONResponse({"error": details}, status, headers)


def _with_retry_after(send: Send) -> Send:
    """Add Retry-After to any 503 that lacks one, also to vLLM's own."""

    def forward(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
            MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_AFTER_S))
        return send(message)

    return forward
