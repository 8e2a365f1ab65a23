"""The HTTP response that streams events to one viewer."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from vllm_omni_plugin.admin.hold import RETRY_AFTER_S
from vllm_omni_plugin.admin.watch.fleet_broadcast import MAX_VIEWERS, FleetBroadcast
from vllm_omni_plugin.admin.watch.server_sent import MEDIA_TYPE

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
