"""Requests that arrive at a given rate whatever becomes of those before, from clients whose patience is limited."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from load import Answer, Connection, completion, connect
from processes import MODEL_NAME, WORDS, percentile

FAILED = "failed"
"""Outcome of what broke for another reason than a refusal or the client's impatience."""


@dataclass(frozen=True)
class Lengths:
    """Of requests, drawn evenly between the least and the most.

    Attributes:
        prompt_words: of the vocabulary in this module, about 2.4 tokens each.
        output_tokens: exactly.
    """

    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True)
class Clients:
    """Who asks.

    Attributes:
        deadline_s: seconds to the first token; an answer that begins later is worth nothing.
        patience_s: after so many seconds without a first token they hang up.
        tenant: they name, or "".
    """

    deadline_s: float
    patience_s: float
    tenant: str = ""

    def headers(self) -> dict[str, str]:
        """What they say of themselves."""
        return {"X-Request-Timeout": f"{self.deadline_s:g}"} | ({"X-Tenant-ID": self.tenant} if self.tenant else {})


@dataclass(frozen=True)
class Asked:
    """One request and what became of it.

    Attributes:
        at: seconds after the first could have come.
        tokens: it asked for.
        answer: that came.
        good: whether all of it came, and the first token in time.
    """

    at: float
    tokens: int
    answer: Answer
    good: bool

    @property
    def outcome(self) -> str:
        """`good`, `late`, `given up`, `failed`, or the status of a refusal."""
        answer = self.answer
        if self.good:
            return "good"
        if answer.whole:
            return "late"
        if answer.error == GIVEN_UP:
            return "given up"
        return str(answer.status) if answer.status in _REFUSALS else FAILED


@dataclass(frozen=True)
class Figures:
    """Of the requests that arrived in some time. Times in seconds.

    Attributes:
        offered: requests per second.
        goodput: requests per second that were answered whole, the first token in time.
        outcomes: how many requests, by what became of them.
        ttft_p50, ttft_p99: time to first token of those that were answered whole, in time or not.
        retry_after: median of what refusals said, 0 without any.
        refused_p99: time until a refusal came.
    """

    offered: float
    goodput: float
    outcomes: dict[str, int]
    ttft_p50: float
    ttft_p99: float
    retry_after: float
    refused_p99: float

    @classmethod
    def of(cls, asked: Sequence[Asked], seconds: float) -> "Figures":
        """Of these, which arrived in so many seconds."""
        outcomes = Counter(one.outcome for one in asked)
        answers = [one.answer for one in asked]
        first = [answer.first - answer.started for answer in answers if answer.whole] or [0.0]
        refused = [answer for answer in answers if answer.status in _REFUSALS]
        return cls(
            offered=len(asked) / seconds,
            goodput=outcomes["good"] / seconds,
            outcomes=dict(outcomes),
            ttft_p50=percentile(first, 0.5),
            ttft_p99=percentile(first, 0.99),
            retry_after=statistics.median([answer.retry_after for answer in refused] or [0]),
            refused_p99=percentile([answer.ended - answer.started for answer in refused] or [0.0], 0.99),
        )


GIVEN_UP = "the client gave up"
_REFUSALS = (408, 429, 503)


async def arrive(
    url: str, rate: float, seconds: float, lengths: Lengths, clients: Clients, rng: random.Random
) -> list[Asked]:
    """Ask at Poisson's times for so long; returns when all of it has ended."""
    began = asyncio.get_running_loop().time()
    asked: list[asyncio.Task[Asked]] = []
    at = rng.expovariate(rate)
    while at < seconds:
        # Drawn before the wait, so that the load is the same however late this machine is.
        payload, tokens = _draw(lengths, clients, rng)
        await asyncio.sleep(began + at - asyncio.get_running_loop().time())
        asked.append(asyncio.create_task(_ask(url, at, payload, tokens, clients)))
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*asked))


async def saturate(url: str, streams: int, seconds: float, lengths: Lengths, rng: random.Random) -> float:
    """So many streams at a time for so long; returns the answers per second in the latter two thirds."""
    began = time.monotonic()
    patient = Clients(deadline_s=10 * seconds, patience_s=10 * seconds)
    answers: list[Answer] = []

    async def stream() -> None:
        while time.monotonic() < began + seconds:
            payload, tokens = _draw(lengths, patient, rng)
            answers.append((await _ask(url, 0.0, payload, tokens, patient)).answer)

    await asyncio.gather(*(stream() for _ in range(streams)))
    counted = [answer for answer in answers if answer.whole and seconds / 3 < answer.ended - began < seconds]
    return len(counted) / (seconds * 2 / 3)


def _draw(lengths: Lengths, clients: Clients, rng: random.Random) -> tuple[bytes, int]:
    words = rng.choices(WORDS, k=rng.randint(*lengths.prompt_words))
    tokens = rng.randint(*lengths.output_tokens)
    # No two prompts begin alike, so that no cache helps.
    prompt = f"{rng.getrandbits(40):013} {' '.join(words)}"
    return completion(MODEL_NAME, prompt, tokens, clients.headers()), tokens


async def _ask(url: str, at: float, payload: bytes, tokens: int, clients: Clients) -> Asked:
    """On a connection of its own, as many clients do."""
    loop, started = asyncio.get_running_loop(), time.monotonic()
    try:
        connection = await connect(url)
    except OSError as error:
        return Asked(at, tokens, Answer(started, ended=time.monotonic(), error=repr(error)), good=False)
    answered = connection.ask(payload)
    giving_up = loop.call_later(started + clients.patience_s - time.monotonic(), _give_up, connection)
    answer = await answered
    giving_up.cancel()
    connection.close()
    answer.started = started
    answer.pieces.clear()
    return Asked(at, tokens, answer, answer.whole and answer.first - started <= clients.deadline_s)


def _give_up(connection: Connection) -> None:
    if not connection.has_begun:
        connection.close(GIVEN_UP)
