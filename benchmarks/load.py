"""A client that costs the machine little: streamed answers over raw connections, whose events are not parsed."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import cast
from urllib.parse import urlsplit

_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_WHOLE = b'"finish_reason":"length"'
_LONGEST = max(len(_END), len(_WHOLE))
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_RETRY_AFTER = re.compile(rb"\r\nretry-after: (\d+)\r\n", re.IGNORECASE)
_TEXT = re.compile(rb'"(?:content|text)":("(?:[^"\\]|\\.)*")')
# The piece that names the role comes before there is a token.
_TOKEN = re.compile(rb'"(?:content|text)":"[^"]')
_PAUSE_S = 0.02
"""Before the next try of a stream whose connection was refused or lost."""


@dataclass
class Answer:
    """What a client saw of one streamed answer. Times are monotonic seconds.

    Attributes:
        started: when it was asked for.
        question: the prompt, or the last message.
        first: of the first token, 0.0 if there was none.
        last: of the last piece with a token.
        ended: when nothing more was to come.
        longest_gap: seconds of the longest wait between two pieces.
        whole: whether all tokens came.
        error: what went wrong, or "".
        status: of HTTP, 0 if none came.
        retry_after: seconds that a refusal names, or 0.
        pieces: as they came.
    """

    started: float
    question: str = ""
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    longest_gap: float = 0.0
    whole: bool = False
    error: str = ""
    status: int = 0
    retry_after: int = 0
    pieces: list[bytes] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token, 0.0 without one."""
        return self.first - self.started if self.first else 0.0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(json.loads(piece) for piece in _TEXT.findall(b"".join(self.pieces)))


@dataclass
class Client:
    """Asks this model of a server for chats of so many tokens.

    Attributes:
        answers: those that have ended, in this order.
        refused: connections that could not be made.
    """

    url: str
    model: str
    tokens: int
    answers: list[Answer] = field(default_factory=list)
    refused: int = 0

    async def ask_all(self, questions: Sequence[str], streams: int, seconds: float) -> None:
        """Ask one after the other and from the first one again, so many at a time, for so long."""
        until, turn = time.monotonic() + seconds, count()

        async def stream() -> None:
            while time.monotonic() < until:
                try:
                    async with self._connection() as connection:
                        while time.monotonic() < until and not connection.closed:
                            question = questions[next(turn) % len(questions)]
                            await self._ask(connection, [{"role": "user", "content": question}])
                except OSError:
                    self.refused += 1
                await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(stream() for _ in range(streams)))

    async def converse(self, questions: Sequence[tuple[float, str]]) -> None:
        """Ask each one so many seconds after the answer to the one before, with all that was said."""
        messages: list[dict[str, str]] = []
        for pause, question in questions:
            await asyncio.sleep(pause)
            messages.append({"role": "user", "content": question})
            async with self._connection() as connection:
                answer = await self._ask(connection, messages)
            messages.append({"role": "assistant", "content": answer.text})

    async def _ask(self, connection: "Connection", messages: Sequence[dict[str, str]]) -> Answer:
        answer = await connection.ask(chat(self.model, messages, self.tokens))
        answer.question = messages[-1]["content"]
        self.answers.append(answer)
        return answer

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator["Connection"]:
        connection = await connect(self.url)
        try:
            yield connection
        finally:
            connection.close()


def completion(model: str, prompt: str, tokens: int, headers: Mapping[str, str]) -> bytes:
    """A request for exactly so many tokens after a prompt."""
    return _post("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": tokens}, headers)


def chat(model: str, messages: Sequence[dict[str, str]], tokens: int) -> bytes:
    """A request for an answer of exactly so many tokens."""
    return _post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": tokens}, {})


def _post(path: str, body: Mapping[str, object], headers: Mapping[str, str]) -> bytes:
    payload = json.dumps({**body, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: benchmark", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode() + payload


async def connect(url: str) -> "Connection":
    """A connection to a server. Raises OSError if it is refused."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, address.hostname or "", address.port or 0)
    return connection


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request in flight."""

    def __init__(self) -> None:
        self.closed = False
        self._tail = b""
        self._answer: Answer | None = None
        self._ended: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def has_begun(self) -> bool:
        """Whether no answer is waited for, or its first token is there."""
        return self._answer is None or self._answer.first > 0

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        """Send a request; done when its answer has ended, which closing the connection does, too."""
        self._answer = Answer(time.monotonic())
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
        answer.pieces.append(data)
        if _TOKEN.search(data):
            if answer.first:
                answer.longest_gap = max(answer.longest_gap, now - answer.last)
            answer.first, answer.last = answer.first or now, now
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
