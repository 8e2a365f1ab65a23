"""Requests of the head to its own front end, at the socket where clients connect."""

import argparse
import asyncio
import json
import socket
import ssl
from contextlib import suppress
from typing import Any

from vllm import envs

_LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses at which to reach a server that listens on all."""


class FrontEndHttp:
    """Asks whoever accepts connections on the listening socket, or will do so; what is asked waits meanwhile."""

    def __init__(self, listening: socket.socket, args: argparse.Namespace) -> None:
        self._listening = listening
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._context: ssl.SSLContext | None = None
        if args.ssl_certfile:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
            if args.ssl_cert_reqs:
                # The front end logs an error for each client without a certificate, and says itself if this cannot be
                # read.
                with suppress(OSError):
                    self._context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        keys = args.api_key or [envs.VLLM_API_KEY]
        self._key = f"Authorization: Bearer {keys[0]}\r\n" if keys[0] else ""

    async def health(self) -> bytes:
        """The status line of `/health`; empty if the connection is refused.

        The connection is kept: one that has no descriptors for further ones answers its clients, and need not end.
        """
        is_new, headers = self._kept is None, b""
        with suppress(OSError, EOFError):
            try:
                self._kept = self._kept or await self._connect()
                reader, writer = self._kept
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                headers = await reader.readuntil(b"\r\n\r\n")
            finally:
                if b"content-length: 0\r\n" not in headers.lower():
                    self.close()
        # One that is not used for long is closed.
        return headers.partition(b"\r\n")[0] if headers or is_new else await self.health()

    def close(self) -> None:
        """Keep no connection: who accepted it has ended."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    async def post(self, path: str, body: dict[str, Any]) -> str:
        """Post JSON; returns the answer, which is empty if the status is 200."""
        text = json.dumps(body)
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n{self._key}"
        request = f"POST {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n{text}".encode()
        answer = b""
        with suppress(OSError):
            reader, writer = await self._connect()
            try:
                writer.write(request)
                answer = await reader.read()
            finally:
                writer.close()
        headers, _, said = answer.decode(errors="replace").partition("\r\n\r\n")
        status = headers.partition("\r\n")[0]
        return "" if " 200 " in status else f"{status} {said}".strip() or "no answer"

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A server may refuse this client's certificate, which is an answer too.
        if self._listening.family == socket.AF_UNIX:
            return await asyncio.open_unix_connection(self._listening.getsockname(), ssl=self._context)
        host, port = self._listening.getsockname()[:2]
        return await asyncio.open_connection(_LOCAL.get(host, host), port, ssl=self._context)
