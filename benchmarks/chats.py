"""Streamed chats over raw connections whose answers are kept, for what `vllm-rs bench serve` cannot ask or compare."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import NamedTuple
from urllib.parse import urlsplit

from load import Connection

_CONTENT = re.compile(rb'"content":("(?:[^"\\]|\\.)*")')
# The piece that names the role comes before there is a token.
_TOKEN = re.compile(rb'"content":"[^"]')
_PAUSE_S = 0.02
"""Before the next try of a stream whose connection was refused or lost."""


class Chat(NamedTuple):
    """The last question of a chat and what came of it. Times in seconds; `ttft` is 0.0 without a token."""

    question: str
    answer: str
    error: str
    started: float
    ttft: float
    longest_gap: float


@dataclass
class Client:
    """Asks this model of a server for so many tokens at a time.

    Attributes:
        chats: those that have ended, in this order.
        refused: connections that could not be made.
    """

    url: str
    model: str
    tokens: int
    chats: list[Chat] = field(default_factory=list)
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
                chat = await self._ask(connection, messages)
            messages.append({"role": "assistant", "content": chat.answer})

    async def _ask(self, connection: "_Keeping", messages: Sequence[dict[str, str]]) -> Chat:
        body = {"model": self.model, "messages": messages, "max_tokens": self.tokens, "temperature": 0}
        payload = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\n"
        connection.received, connection.times = [], []
        answer = await connection.ask(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        text = "".join(json.loads(piece) for piece in _CONTENT.findall(b"".join(connection.received)))
        ttft = connection.times[0] - answer.started if connection.times else 0.0
        gap = max((later - sooner for sooner, later in pairwise(connection.times)), default=0.0)
        self.chats.append(Chat(messages[-1]["content"], text, answer.error, answer.started, ttft, gap))
        return self.chats[-1]

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator["_Keeping"]:
        address, loop = urlsplit(self.url), asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Keeping, address.hostname or "", address.port or 0)
        try:
            yield connection
        finally:
            connection.close()


class _Keeping(Connection):
    """Keeps what it receives, which is looked into when the answer has ended, and the times of tokens."""

    received: list[bytes]
    times: list[float]

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        if _TOKEN.search(data):
            self.times.append(time.monotonic())
        super().data_received(data)
