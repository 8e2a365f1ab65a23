"""Many clients at once, some of which leave early: every stream ends once, and nothing is left behind."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from .both_replicas import assignments
from .server import IN_FLIGHT, MODEL, RUST, Server, until

STREAMS = 200
TOKENS = 48
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")

pytestmark = pytest.mark.both_front_ends


def in_flight(fleet: Server) -> dict[str, float]:
    return fleet.by_replica(IN_FLIGHT)


def busy(fleet: Server) -> dict[str, float]:
    """Requests that the head charges a replica with, or that an engine says it has; empty when all is over."""
    counts = {f"in flight on replica {replica}": count for replica, count in in_flight(fleet).items()}
    for gauge in GAUGES:
        counts |= {f"{gauge} of engine {engine}": count for engine, count in fleet.by_engine(gauge).items()}
    assert len(counts) == 6, counts
    return {name: count for name, count in counts.items() if count}


def wait_until_idle(fleet: Server) -> None:
    """Fails when the fleet still believes in requests whose clients have gone."""
    until(lambda: not busy(fleet), f"everything is over: {busy(fleet)}")


@asynccontextmanager
async def paused(fleet: Server) -> AsyncIterator[None]:
    """Meanwhile no request can end by itself."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30.0) as client:
        await client.post("/pause", params={"mode": "keep"})
        try:
            yield
        finally:
            await client.post("/resume")


@pytest.fixture
def samples(front_end: str) -> int:
    """Of a request; vLLM's Rust front end makes one of each."""
    return 1 if front_end == RUST else 4


def body(tokens: int, **changes: Any) -> dict[str, Any]:
    """A request that ends at its token limit and nowhere else."""
    return {"model": MODEL, "max_tokens": tokens, "seed": 1, "extra_body": {"ignore_eos": True}, **changes}


async def read_stream(client: openai.AsyncOpenAI, number: int, leave_after: int | None) -> Counter[str]:
    """Count what a stream brings; leave it after so many chunks, if any."""
    seen: Counter[str] = Counter()
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    request = body(TOKENS, prompt=f"Request {number}", stream=True, stream_options=options)
    async with await client.completions.create(**request) as stream:
        async for chunk in stream:
            seen["chunks"] += 1
            seen["ends"] += sum(choice.finish_reason is not None for choice in chunk.choices)
            if chunk.usage is not None:
                seen["tokens"] = chunk.usage.completion_tokens
            if seen["chunks"] == leave_after:
                return seen
    return seen


async def test_streams_end_once_while_others_are_abandoned(fleet: Server) -> None:
    before = assignments(fleet)
    async with fleet.async_client() as client:
        seen = await asyncio.gather(
            *(read_stream(client, number, 3 if number % 3 == 0 else None) for number in range(STREAMS))
        )
    stayed = [counts for number, counts in enumerate(seen) if number % 3]
    assert {(counts["ends"], counts["tokens"]) for counts in stayed} == {(1, TOKENS)}
    assert {counts["chunks"] for number, counts in enumerate(seen) if number % 3 == 0} == {3}
    wait_until_idle(fleet)
    after = assignments(fleet)
    share = {replica: after[replica] - before[replica] for replica in after}
    assert sum(share.values()) == STREAMS
    assert min(share.values()) > STREAMS / 3, share


async def test_an_answer_is_the_same_alone_and_among_many(fleet: Server) -> None:
    async with fleet.async_client() as client:

        async def answer(number: int) -> str:
            completion = await client.completions.create(**body(16, prompt=f"Question {number}", temperature=0))
            text: str = completion.choices[0].text
            return text

        alone = [await answer(number) for number in range(8)]
        together = await asyncio.gather(*(answer(number % 8) for number in range(64)))
    assert together == alone * 8


async def test_requests_whose_clients_leave_are_aborted(fleet: Server, samples: int) -> None:
    before = tokens_generated(fleet)
    async with fleet.async_client() as client, paused(fleet):
        stream = await client.completions.create(**body(TOKENS, prompt="Leave me", stream=True, n=samples))
        requests = [
            asyncio.create_task(client.completions.create(**body(TOKENS, prompt=f"Wait {number}", n=samples)))
            for number in range(4)
        ]
        begun = 5 * samples
        await asyncio.to_thread(until, lambda: sum(in_flight(fleet).values()) == begun, "all samples are in flight")
        await stream.close()
        for request in requests:
            request.cancel()
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        await asyncio.to_thread(until, lambda: not any(in_flight(fleet).values()), "nothing is in flight")
    wait_until_idle(fleet)
    assert tokens_generated(fleet) == before


def tokens_generated(fleet: Server) -> float:
    """By all engines since their start."""
    return sum(fleet.by_engine("vllm:generation_tokens_total").values())
