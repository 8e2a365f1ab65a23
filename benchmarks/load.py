"""A load that costs the machine little: streamed completions over raw connections, whose events are not parsed."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast
from urllib.parse import urlsplit

from processes import MODEL_NAME

_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_WHOLE = b'"finish_reason":"length"'
_LONGEST = max(len(_END), len(_WHOLE))
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_RETRY_AFTER = re.compile(rb"\r\nretry-after: (\d+)\r\n", re.IGNORECASE)
_PAUSE_S = 0.1
"""Before the next try of a stream whose connection was refused."""


@dataclass
class Answer:
    """What a client saw of one streamed completion. Times are monotonic seconds.

    Attributes:
        started: when it was asked for.
        port: the client's, of the connection.
        first: of the first token, 0.0 if there was none.
        last: of the last piece.
        ended: when nothing more was to come.
        events: pieces in which the tokens came; a server that lags behind its engines puts several into one.
        longest_gap: seconds of the longest wait between two pieces.
        whole: whether all tokens came.
        error: what went wrong, or "".
        status: of HTTP, 0 if none came.
        retry_after: seconds that a refusal names, or 0.
    """

    started: float
    port: int
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    events: int = 0
    longest_gap: float = 0.0
    whole: bool = False
    error: str = ""
    status: int = 0
    retry_after: int = 0


@dataclass
class Load:
    """So many streams at a time, each with one request after the other on a connection of its own.

    Args:
        url: of the server.
        streams: how many.
        tokens: of every answer.
        prompt: of every request; what comes before it is a number that no other one has.

    Attributes:
        answers: all that have ended, in this order.
        refused: connections that could not be made.
    """

    url: str
    streams: int
    tokens: int
    prompt: str = "and so on " * 16
    answers: list[Answer] = field(default_factory=list)
    refused: int = 0
    _asked: int = 0

    async def run(self, seconds: float) -> None:
        """Ask for so long, and wait for the answers that are on their way."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._stream(until) for _ in range(self.streams)))

    async def _stream(self, until: float) -> None:
        loop, address = asyncio.get_running_loop(), urlsplit(self.url)
        host, port = address.hostname or "", address.port or 0
        while time.monotonic() < until:
            try:
                _, connection = await loop.create_connection(Connection, host, port)
            except OSError:
                self.refused += 1
                await asyncio.sleep(_PAUSE_S)
                continue
            while time.monotonic() < until and not connection.closed:
                self.answers.append(await connection.ask(self._request()))
            connection.close()

    def _request(self) -> bytes:
        self._asked += 1
        return request(f"{self._asked:08} {self.prompt}", self.tokens)


def request(prompt: str, tokens: int, **headers: str) -> bytes:
    """What asks for so many tokens, streamed; names of headers have `_` for `-`."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens}
    payload = json.dumps(body | {"temperature": 0, "ignore_eos": True, "stream": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: benchmark", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode() + payload


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request in flight."""

    def __init__(self) -> None:
        self.closed = False
        self._tail = b""
        self._answer: Answer | None = None
        self._ended: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._port: int = transport.get_extra_info("sockname")[1]

    @property
    def has_begun(self) -> bool:
        """Whether no answer is waited for, or its first token is there."""
        return self._answer is None or self._answer.events > 0

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        """Send a request; done when its answer has ended, which closing the connection does, too."""
        self._answer = Answer(time.monotonic(), self._port)
        self._ended = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._transport.write(request)
        return self._ended

    def data_received(self, data: bytes) -> None:
        now, answer = time.monotonic(), self._answer
        if answer is not None and not answer.status:
            answer.status, answer.retry_after = _status(data)
        if answer is None or answer.status != HTTPStatus.OK:
            self.close(data[:300].decode(errors="replace"))
            return
        if events := data.count(b"data: {"):
            if answer.events:
                answer.longest_gap = max(answer.longest_gap, now - answer.last)
            answer.first, answer.last = answer.first or now, now
            answer.events += events
        # One read may end, and the next begin, in the middle of a word.
        data = self._tail + data
        answer.whole |= _WHOLE in data
        self._tail = data[-_LONGEST:]
        if data.endswith(_END):
            self._end("" if answer.whole else f"the answer ended too soon: {data[-300:].decode(errors='replace')}")

    def connection_lost(self, error: Exception | None) -> None:
        self.close("the connection was lost")

    def close(self, error: str = "") -> None:
        """Close it, which ends a request in flight with this error."""
        self.closed = True
        self._transport.close()
        self._end(error)

    def _end(self, error: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and self._ended is not None and not self._ended.done():
            answer.ended, answer.error = time.monotonic(), error
            self._ended.set_result(answer)


def _status(data: bytes) -> tuple[int, int]:
    """Status and seconds of `Retry-After` of an answer that begins with this; 0 for what it does not have."""
    status = _STATUS.match(data)
    retry_after = _RETRY_AFTER.search(data)
    return int(status[1]) if status else 0, int(retry_after[1]) if retry_after else 0
