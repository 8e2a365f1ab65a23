"""The answer to one viewer: a stream, until the viewer does not read it."""

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
"""Seconds in which a viewer must take what it is sent, and its machine say that it is there. A server does not end
before its connections have."""


class EventStreamResponse(StreamingResponse):
    """Sends a stream as server-sent events, and drops the connection of who does not read them.

    Args:
        viewers: may be full; then an `HTTPException` says so instead.
        chunks: the stream; is closed in any case.
        headers: of the answer.
    """

    media_type = MEDIA_TYPE

    def __init__(self, viewers: FleetBroadcast, chunks: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(chunks, headers=headers)
        self._viewers = viewers
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        for connection in _connections(scope):
            _notice_silence(connection.transport.get_extra_info("socket"))
        async with aclosing(self._chunks):
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                for connection in _connections(scope):
                    # What is closed waits for all that is written to be read, and this does not.
                    connection.transport.abort()

    async def stream_response(self, send: Send) -> None:
        """Send all of the stream."""
        if self._viewers.is_full:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_VIEWERS} streams are open already.", headers)
        # Nothing is waited for until it counts as a viewer.
        chunk = await anext(self._chunks)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _connections(scope: Scope) -> Iterator[Any]:
    """uvicorn's own of a request: one, and none of another server's."""
    server: Any = getattr(scope["app"].state, "server", None)
    for connection in tuple(server.server_state.connections) if server is not None else ():
        # uvicorn has one scope at a time for each connection.
        if getattr(connection, "scope", None) is scope:
            yield connection


def _notice_silence(connection: Any) -> None:
    """End a connection whose other machine has vanished: what a viewer is sent fits into buffers for a long time.

    Args:
        connection: its socket. By itself TCP gives up after a quarter of an hour.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_TIMEOUT_S))
