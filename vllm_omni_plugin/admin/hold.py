"""Hold, then refuse: a middleware that lets requests wait for a replica before their answer begins.

Later would be too late for a stream: its status line says 200 by then, and a refusal could only be an error event.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.admin.waiting_room import WaitingRoom
from vllm_omni_plugin.errors import NoReplicaError

RETRY_AFTER_S = 5
"""What a refused client is told: about the time in which a replica that died comes back or a spare one joins."""
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this status; it keeps a client that left out of the server errors in metrics and logs."""


class HoldMiddleware:
    """Lets a POST to an inference path wait in `app.state.omni_waiting_room`; everything else passes at once.

    A refusal is a 503 with `Retry-After`, in the shape of OpenAI's errors. Any other 503 of these paths gets the same
    header: vLLM's error handlers set none.

    Args:
        app: the next application.
        paths: the inference paths, below the root path.
        has_key: whether headers have a valid API key, or the server wants none. vLLM does not check the keys of all
            paths, and requests without one must not take the places of those with one.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str], has_key: Callable[[Headers], bool]) -> None:
        self._app = app
        self._paths = paths
        self._has_key = has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room = self._room(scope)
        if room is None:
            await self._app(scope, receive, send)
        elif not room.is_needed:
            await self._app(scope, receive, _with_retry_after(send))
        else:
            await self._hold(room, scope, receive, _with_retry_after(send))

    def _room(self, scope: Scope) -> WaitingRoom | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        if scope["path"].removeprefix(scope.get("root_path", "")) not in self._paths:
            return None
        return getattr(scope["app"].state, "omni_waiting_room", None)

    async def _hold(self, room: WaitingRoom, scope: Scope, receive: Receive, send: Send) -> None:
        ahead = _ReadAhead(receive)
        try:
            if await room.wait(ahead.until_disconnect, self._has_key(Headers(scope=scope))):
                await self._app(scope, ahead.receive, send)
            else:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        except NoReplicaError as error:
            await _refusal(error)(scope, receive, send)
        finally:
            ahead.close()


class _ReadAhead:
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


def _refusal(error: NoReplicaError) -> Response:
    status = HTTPStatus.SERVICE_UNAVAILABLE
    details = {"message": str(error), "type": status.phrase, "param": None, "code": status.value}
    return JSONResponse({"error": details}, status)


def _with_retry_after(send: Send) -> Send:
    def forward(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
            MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_AFTER_S))
        return send(message)

    return forward
