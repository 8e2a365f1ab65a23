"""HTTP routes that show the fleet: its events, its state and the page, and the response that streams to one viewer."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from vllm_omni_plugin.admin.access import Access
from vllm_omni_plugin.admin.hold import RETRY_AFTER_S
from vllm_omni_plugin.admin.routes import app_state
from vllm_omni_plugin.admin.watch.fleet_broadcast import MAX_VIEWERS, FleetBroadcast
from vllm_omni_plugin.admin.watch.server_sent import LAST_EVENT_ID, MEDIA_TYPE
from vllm_omni_plugin.orchestrator.event_log import FleetEvent

SEND_TIMEOUT_S = 30.0
"""Seconds in which a viewer must read what it is sent, and its machine must acknowledge it. The server cannot end while
connections are open."""


class EventStreamResponse(StreamingResponse):
    """Sends server-sent events; closes the connection of a viewer who does not read them. Always closes `chunks`.

    Raises an `HTTPException` if `broadcast` is full.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self, broadcast: FleetBroadcast, chunks: AsyncGenerator[bytes], more_headers: Mapping[str, str] | None = None
    ) -> None:
        # A proxy must not buffer a stream.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(more_headers or {})}
        super().__init__(chunks, headers=headers)
        self._broadcast = broadcast
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End a stream whose viewer reads nothing: it is aborted after `SEND_TIMEOUT_S`."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        for connection in _connections(scope):
            _set_user_timeout(connection.transport.get_extra_info("socket"))
        async with aclosing(self._chunks):
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                for connection in _connections(scope):
                    # Unlike `close`, `abort` does not wait until written data is read.
                    connection.transport.abort()

    async def stream_response(self, send: Send) -> None:
        """Send chunks; 503 if `MAX_VIEWERS` streams are open already."""
        if self._broadcast.is_full:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_VIEWERS} streams are open already.", headers)
        # The first chunk comes without a wait, and from then on this stream counts as a viewer.
        chunk = await anext(self._chunks)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _connections(scope: Scope) -> Iterator[Any]:
    """uvicorn's connection of a request; none under another server."""
    server: Any = getattr(scope["app"].state, "server", None)
    for connection in tuple(server.server_state.connections) if server is not None else ():
        if getattr(connection, "scope", None) is scope:
            yield connection


def _set_user_timeout(connection: Any) -> None:
    """Close a socket whose peer is unreachable. By itself, TCP gives up after a quarter of an hour."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_TIMEOUT_S))


MAY_CHANGE = "X-Omni-May-Change"
"""Header of a stream with states: the page shows its buttons, since the viewer's key is one for changes."""
_PAGE = {
    "": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""File and media type by path below the prefix."""
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def build_watch_router(access: Access) -> APIRouter:
    """The routes under `/omni` that show the fleet. They use `omni_broadcast` (`FleetBroadcast`) of `app.state`.

    The page itself contains no data of the fleet and needs no key. Its script requests the other routes with the key
    that the user enters.
    """
    router = APIRouter(prefix="/omni", tags=["fleet"])
    readers = [Depends(access.require_read)]

    @router.get("/events", dependencies=readers, response_model=dict[str, list[FleetEvent]])
    async def events(request: Request) -> Any:
        broadcast: FleetBroadcast = app_state(request, "omni_broadcast")
        last_id = _last_event_id(request)
        if _wants_stream(request):
            return EventStreamResponse(broadcast, broadcast.stream(last_id))
        return {"events": broadcast.events(last_id)}

    @router.get("/fleet", dependencies=readers, response_model=None)
    async def fleet(request: Request) -> Any:
        broadcast: FleetBroadcast = app_state(request, "omni_broadcast")
        if _wants_stream(request):
            # Only with a key: a browser's changes have the header `Origin`, so they count as local nowhere.
            may_change = {MAY_CHANGE: "1"} if access.has_admin_key(request.headers) else {}
            chunks = broadcast.stream(_last_event_id(request), with_state=True)
            return EventStreamResponse(broadcast, chunks, may_change)
        return broadcast.state()

    for path, (name, media_type) in _PAGE.items():
        _serve_file(router, path, name, media_type)
    return router


def _serve_file(router: APIRouter, path: str, name: str, media_type: str) -> None:
    content = files(__package__).joinpath(name).read_bytes()

    @router.get(path, include_in_schema=False)
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)


def _wants_stream(request: Request) -> bool:
    return MEDIA_TYPE in request.headers.get("accept", "")


def _last_event_id(request: Request) -> str:
    return request.headers.get(LAST_EVENT_ID, "")
