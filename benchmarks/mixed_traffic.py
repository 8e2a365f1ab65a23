"""Requests of many kinds, each of which is accounted for: it was answered, refused, failed, given up, or lost."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

import httpx
from processes import MODEL_NAME
from streams import read_events

PATIENCE_S = 120.0
"""Without an end for so long, a request counts as lost."""
_PROMPTS = 40
_SESSIONS = 12
_TOO_LONG = "word " * 6000
_EXAMPLES = 10
_NOT_TO_BE_ANSWERED = {"unknown model", "too long"}
"""Kinds that are refused in any case."""


class End(Enum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """By 400 or 404 where that is the right answer, or by 503, after which it may be sent again."""
    GIVEN_UP = "given up"
    """By its client, on purpose."""
    FAILED = "failed"
    """With any other error."""
    LOST = "lost"
    """Without an end: the stream stopped, the connection broke, or nothing came."""


@dataclass
class Accounts:
    """What became of the requests.

    Attributes:
        sent: how many were sent, by kind.
        ends: how they ended, by kind and end.
        refusals: how many were refused, by status.
        answers: that clients got to their ends, two for some requests.
        wrong: answers that were not those that the same question had before.
        examples: the first words on what failed, was lost or was wrong.
    """

    sent: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, End]] = field(default_factory=Counter)
    refusals: Counter[int] = field(default_factory=Counter)
    answers: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)

    def total(self, end: End) -> int:
        """Requests of all kinds that ended so."""
        return sum(count for (_, how), count in self.ends.items() if how is end)

    @property
    def lost(self) -> int:
        """Requests that ended without an end, and those that have none in these accounts."""
        return self.total(End.LOST) + self.sent.total() - self.ends.total()

    @property
    def turned_away(self) -> int:
        """Requests that were refused and could have been answered."""
        return sum(
            count for (kind, how), count in self.ends.items() if how is End.REFUSED and kind not in _NOT_TO_BE_ANSWERED
        )

    @property
    def is_balanced(self) -> bool:
        """Whether each request was answered, given up, or refused as it must be, and each answer was right."""
        return not (self.lost or self.turned_away or self.total(End.FAILED) or self.wrong)

    def note(self, example: str) -> None:
        """Keep the first few examples."""
        if len(self.examples) < _EXAMPLES:
            self.examples.append(example[:300])


class Traffic:
    """Sends requests of mixed kinds and keeps accounts.

    Args:
        rng: draws kinds, prompts and lengths.

    Attributes:
        accounts: of all requests so far.
    """

    def __init__(self, rng: random.Random) -> None:
        self.accounts = Accounts()
        self._rng = rng
        self._answers: dict[tuple[str, int], str] = {}
        self._turns: Counter[int] = Counter()
        self._kinds: dict[str, tuple[int, Callable[[httpx.AsyncClient], Awaitable[End]]]] = {
            "stream": (8, self._stream),
            "at once": (3, self._at_once),
            "two choices": (1, self._two_choices),
            "session": (3, self._session),
            "given up": (2, self._given_up),
            "unknown model": (1, self._unknown_model),
            "too long": (1, self._too_long),
        }

    async def ask_any(self, client: httpx.AsyncClient) -> None:
        """Send one request of any kind and account for it."""
        (kind,) = self._rng.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])
        await self.ask(client, kind)

    async def ask(self, client: httpx.AsyncClient, kind: str) -> None:
        """Send one request of this kind and account for it."""
        self.accounts.sent[kind] += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                end = await self._kinds[kind][1](client)
        except (httpx.HTTPError, TimeoutError) as error:
            self.accounts.note(f"{kind}: {error!r}")
            end = End.LOST
        except (KeyError, IndexError, TypeError, ValueError) as error:
            end = self._failed(f"{kind}: an answer in another form: {error!r}")
        self.accounts.ends[kind, end] += 1

    async def _stream(self, client: httpx.AsyncClient) -> End:
        prompt, tokens = f"Tell the story number {self._rng.randrange(_PROMPTS)} to its end", self._tokens()
        return await self._streamed(client, prompt, tokens)

    async def _session(self, client: httpx.AsyncClient) -> End:
        session = self._rng.randrange(_SESSIONS)
        # Twenty turns, then the same anew, so that prompts stay below the limit.
        turn = self._turns[session] = self._turns[session] % 20 + 1
        prompt = f"Session {session}. " + "And what then? " * (4 * turn)
        return await self._streamed(client, prompt, 20, {"X-Session-ID": str(session)})

    async def _streamed(
        self, client: httpx.AsyncClient, prompt: str, tokens: int, headers: dict[str, str] | None = None
    ) -> End:
        body = _body(prompt, tokens) | {"stream": True}
        text, finished = "", False
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                return self._refused(response)
            async for event in read_events(response):
                if "error" in event:
                    return self._failed(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["text"]
                    finished |= choice["finish_reason"] == "length"
        if not finished:
            self.accounts.note(f"a stream stopped after {len(text)} characters")
            return End.LOST
        return self._checked(prompt, tokens, text)

    async def _at_once(self, client: httpx.AsyncClient) -> End:
        prompt, tokens = f"Tell the story number {self._rng.randrange(_PROMPTS)} to its end", self._tokens()
        response = await client.post("/v1/completions", json=_body(prompt, tokens))
        if response.status_code != httpx.codes.OK:
            return self._refused(response)
        return self._checked(prompt, tokens, response.json()["choices"][0]["text"])

    async def _two_choices(self, client: httpx.AsyncClient) -> End:
        body = _body("Two ways to say", self._tokens()) | {"n": 2, "temperature": 1.0}
        response = await client.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            return self._refused(response)
        ends = [choice["finish_reason"] for choice in response.json()["choices"]]
        if ends != ["length"] * 2:
            return self._failed(f"choices ended with {ends}")
        self.accounts.answers += 2
        return End.ANSWERED

    async def _given_up(self, client: httpx.AsyncClient) -> End:
        body = _body("A story that nobody hears the end of", 200) | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                return self._refused(response)
            async for _ in read_events(response):
                return End.GIVEN_UP
        return self._failed("a stream ended before it was given up")

    async def _unknown_model(self, client: httpx.AsyncClient) -> End:
        response = await client.post("/v1/completions", json=_body("Hello", 5) | {"model": "nobody"})
        return self._refused(response, httpx.codes.NOT_FOUND)

    async def _too_long(self, client: httpx.AsyncClient) -> End:
        return self._refused(await client.post("/v1/completions", json=_body(_TOO_LONG, 5)), httpx.codes.BAD_REQUEST)

    def _tokens(self) -> int:
        return self._rng.choice((10, 40, 120))

    def _refused(self, response: httpx.Response, right: int = httpx.codes.SERVICE_UNAVAILABLE) -> End:
        if response.status_code in (right, httpx.codes.SERVICE_UNAVAILABLE):
            self.accounts.refusals[response.status_code] += 1
            return End.REFUSED
        return self._failed(f"{response.status_code} {response.text}")

    def _failed(self, why: str) -> End:
        self.accounts.note(why)
        return End.FAILED

    def _checked(self, prompt: str, tokens: int, text: str) -> End:
        """Greedy answers of a fleet are a function of the question, whatever became of the replicas meanwhile."""
        before = self._answers.setdefault((prompt, tokens), text)
        if before != text:
            self.accounts.wrong += 1
            self.accounts.note(f"{text[:80]!r} instead of {before[:80]!r}")
        self.accounts.answers += 1
        return End.ANSWERED


def _body(prompt: str, tokens: int) -> dict[str, object]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
