"""Who asks: a client of a pipeline, and one that chains plain servers as well as a user could."""

import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from pipeline_servers import EXAMPLES
from processes import MODEL_NAME

from vllm_omni_plugin.pipeline import StageInput, StageOutput, Transfer
from vllm_omni_plugin.stages import StageJob

sys.path.append(str(EXAMPLES))
_CODES, _FIRST_CODE, _CHUNK = 128, 257, 16
"""Of the example `speech`: the talker's codec tokens, and how many of them the vocoder gets at a time."""


@dataclass(frozen=True)
class Answer:
    """What a client got, in seconds since it asked.

    Attributes:
        output: the text or the sound.
        first: until the first of it came.
        whole: until all of it had come.
        calls: how long each call of a chain took.
        timings: what a pipeline says of its stages.
    """

    output: str | bytes
    first: float
    whole: float
    calls: tuple[float, ...] = ()
    timings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Client(Protocol):
    """Asks one set-up. A session keeps its connections alive."""

    async def ask(self, session: aiohttp.ClientSession, prompt: str) -> Answer:
        """Send a prompt and read the answer to its end."""


@dataclass(frozen=True)
class TextPipeline:
    """Asks a pipeline for a text of so many tokens."""

    url: str
    tokens: int

    async def ask(self, session: aiohttp.ClientSession, prompt: str) -> Answer:
        """See `Client`."""
        started, text, first = time.perf_counter(), "", 0.0
        timings: Mapping[str, Mapping[str, float]] = {}
        async for event in _stream(session, self.url, _body(prompt, self.tokens), omni={"timings": True}):
            timings = (event.get("omni") or {}).get("timings") or timings
            if piece := _text(event):
                first = first or time.perf_counter() - started
                text += piece
        return Answer(text, first, time.perf_counter() - started, timings=timings)


@dataclass(frozen=True)
class TextChain:
    """Asks one server after the other for a text of so many tokens; only the last one's is streamed.

    Attributes:
        urls: of the servers.
        tokens: of each answer.
        hops: what makes the next server's prompt of the first prompt and the last answer.
    """

    urls: Sequence[str]
    tokens: int
    hops: Sequence[Callable[[str, str], str]]

    async def ask(self, session: aiohttp.ClientSession, prompt: str) -> Answer:
        """See `Client`."""
        marks, given = [time.perf_counter()], prompt
        for url, hop in zip(self.urls, self.hops, strict=False):
            choice = await _call(session, url, _body(given, self.tokens))
            given = hop(prompt, choice["text"])
            marks.append(time.perf_counter())
        text, first = "", 0.0
        async for event in _stream(session, self.urls[-1], _body(given, self.tokens)):
            if piece := _text(event):
                first = first or time.perf_counter() - marks[0]
                text += piece
        marks.append(time.perf_counter())
        calls = tuple(end - begin for begin, end in itertools.pairwise(marks))
        return Answer(text, first, marks[-1] - marks[0], calls)


@dataclass(frozen=True)
class SpeechPipeline:
    """Asks a pipeline to speak."""

    url: str

    async def ask(self, session: aiohttp.ClientSession, prompt: str) -> Answer:
        """See `Client`."""
        body = {"model": MODEL_NAME, "input": prompt, "voice": "any", "response_format": "pcm"}
        started, sound, first = time.perf_counter(), b"", 0.0
        async with session.post(f"{self.url}/v1/audio/speech", json=body) as response:
            await _check(response)
            async for piece in response.content.iter_any():
                first = first or time.perf_counter() - started
                sound += piece
        return Answer(sound, first, time.perf_counter() - started)


class SpeechChain:
    """Asks the thinker, then the talker, and plays the vocoder itself, which spares it a server.

    Args:
        thinker, talker: URLs.
        thought: tokens of the thinker's answer.
        codes: tokens of the talker's answer.
        talk: more fields of the talker's request.
        chunks: whether codes are made sound as they come, and not when all are there.
    """

    def __init__(
        self, thinker: str, talker: str, thought: int, codes: int, talk: Mapping[str, Any], chunks: bool
    ) -> None:
        from stages.vocoder import Vocoder

        self._thinker, self._talker = thinker, talker
        self._thought, self._codes = thought, codes
        self._talk = {**talk, "return_token_ids": True}
        self._chunk = _CHUNK if chunks else codes
        self._vocoder = Vocoder(first_code=_FIRST_CODE, codes=_CODES, device="cpu")
        self._vocoder.start()

    async def ask(self, session: aiohttp.ClientSession, prompt: str) -> Answer:
        """See `Client`."""
        started, sound, first = time.perf_counter(), b"", 0.0
        memory: dict[str, Any] = {}
        thought = await _call(session, self._thinker, _body(prompt, self._thought))
        async for codes, last in self._spoken(session, thought["text"]):
            sound += self._sound(codes, memory, last)
            first = first or time.perf_counter() - started
        return Answer(sound, first, time.perf_counter() - started)

    async def _spoken(self, session: aiohttp.ClientSession, text: str) -> AsyncIterator[tuple[list[int], bool]]:
        """Pieces of what the talker says, each with whether it is the last."""
        codes: list[int] = []
        async for event in _stream(session, self._talker, _body(text, self._codes), **self._talk):
            for choice in event["choices"]:
                codes += choice["token_ids"] or ()
            while len(codes) > self._chunk:
                yield codes[: self._chunk], False
                del codes[: self._chunk]
        yield codes, True

    def _sound(self, codes: list[int], memory: dict[str, Any], last: bool) -> bytes:
        (output,) = self._vocoder.compute([StageJob(StageInput(token_ids=codes), memory, last)])
        if isinstance(output, Exception):
            raise output
        samples: bytes = (output.tensor * 32767).short().numpy().tobytes()
        return samples


def refine(prompt: str, draft: str) -> str:
    """What the example `refiner` asks its second model."""
    from stages.handover import ask_to_refine

    asked = ask_to_refine({"thinker": StageOutput(text=draft)}, Transfer("", "refiner", prompt=prompt))
    return asked or ""


def as_it_is(prompt: str, answer: str) -> str:
    """The answer, as the built-in transform `text` hands it on."""
    return answer


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _text(event: Mapping[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


async def _call(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        await _check(response)
        choice: dict[str, Any] = (await response.json())["choices"][0]
    return choice


async def _stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], **more: object
) -> AsyncIterator[dict[str, Any]]:
    async with session.post(f"{url}/v1/completions", json={**body, **more, "stream": True}) as response:
        await _check(response)
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(f"{url}: {event['error']}")
                yield event


async def _check(response: aiohttp.ClientResponse) -> None:
    if not response.ok:
        raise RuntimeError(f"{response.url}: {response.status} {(await response.text())[:500]}")
