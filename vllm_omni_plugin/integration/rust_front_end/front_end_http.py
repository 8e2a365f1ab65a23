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
        """The status line of `/health`; empty if the connection is refused."""
        return await self._ask("GET /health HTTP/1.1\r\n", "")

    async def post(self, path: str, body: dict[str, Any]) -> str:
        """Post JSON; returns the answer, which is empty if the status is 200."""
        text = json.dumps(body)
        headers = f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n{self._key}"
        answer = (await self._ask(f"POST {path} HTTP/1.1\r\n{headers}", text)).decode(errors="replace")
        headers, _, said = answer.partition("\r\n\r\n")
        status = headers.partition("\r\n")[0]
        return "" if " 200 " in status else f"{status} {said}".strip() or "no answer"

    async def _ask(self, head: str, body: str) -> bytes:
        listening, context = self._listening, self._context
        # A server may refuse this client's certificate, which is an answer too.
        with suppress(OSError):
            if listening.family == socket.AF_UNIX:
                reader, writer = await asyncio.open_unix_connection(listening.getsockname(), ssl=context)
            else:
                host, port = listening.getsockname()[:2]
                reader, writer = await asyncio.open_connection(_LOCAL.get(host, host), port, ssl=context)
            try:
                writer.write(f"{head}Host: localhost\r\nConnection: close\r\n\r\n{body}".encode())
                return await (reader.read() if body else reader.readline())
            finally:
                writer.close()
        return b""
