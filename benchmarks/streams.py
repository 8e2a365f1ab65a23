"""Streaming completions with the time of every piece, for the benchmarks that look at pauses."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from processes import MODEL_NAME

TIMEOUT_S = 300.0


@dataclass
class Stream:
    """What a client saw of one streamed completion.

    Attributes:
        prompt: what was asked.
        started: monotonic seconds of the request.
        arrivals: monotonic seconds of each piece of text.
        text: all of them together.
        error: what went wrong, or "".
        finished: whether a finish reason came.
    """

    prompt: str
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    finished: bool = False

    @property
    def longest_gap(self) -> float:
        """Seconds of the longest wait between two pieces; 0.0 with fewer than two."""
        return max(
            (later - sooner for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0
        )


async def run_stream(client: httpx.AsyncClient, prompt: str, tokens: int, **options: object) -> Stream:
    """Ask for exactly so many tokens, greedily, and read the answer to its end."""
    stream = Stream(prompt, started=time.monotonic())
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    try:
        request = client.stream("POST", "/v1/completions", json={**body, "stream": True, **options}, timeout=TIMEOUT_S)
        async with request as response:
            if response.status_code != httpx.codes.OK:
                stream.error = f"{response.status_code} {(await response.aread()).decode()[:300]}"
                return stream
            async for event in read_events(response):
                _add_event(stream, event)
    except httpx.HTTPError as error:
        stream.error = repr(error)
    if not stream.finished and not stream.error:
        stream.error = "the stream ended without a finish reason"
    return stream


async def read_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    async for line in _lines(response):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of server-sent events, which end at a line feed only; HTTPX's also end at other breaks inside a text."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def _add_event(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error = str(event["error"])
        return
    for choice in event["choices"]:
        if choice["text"]:
            stream.arrivals.append(time.monotonic())
            stream.text += choice["text"]
        stream.finished |= choice["finish_reason"] is not None
