"""A front end that lags: its fleet's replicas are not read meanwhile, and nothing is lost or out of order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from vllm.v1.engine import EngineCoreOutput

from tests.fakes.conditions import eventually

from .played import READY, PlayedFrontEnd, RustFleet

BYTES_LIMIT = 50_000
MESSAGES_LIMIT = 4096
IN_SOCKETS = 4000
"""More messages than fit into the sockets of both sides and the kernel between them."""


@asynccontextmanager
async def slow_front_end(folder: Path, max_buffered_bytes: int) -> AsyncIterator[tuple[RustFleet, PlayedFrontEnd]]:
    """One that keeps one message unread, and has request "a-1"."""
    async with (
        RustFleet(replicas=2, max_buffered_bytes=max_buffered_bytes) as fleet,
        PlayedFrontEnd(folder, unread=1) as front_end,
    ):
        fleet.link.connect(front_end.addresses, READY)
        await front_end.greeted()
        await front_end.add("a-1")
        await fleet.has("a-1")
        yield fleet, front_end


def say_until_paused(fleet: RustFleet, size: int = 1) -> int:
    """Say outputs of so many tokens each, which are the number of the output. Returns how many went out."""
    link, engine_id = fleet.run_of("a-1")
    number = 0
    while not link.paused:
        link.say_outputs(outputs=[EngineCoreOutput(engine_id, [number] * size)])
        number += 1
        assert number < MESSAGES_LIMIT + IN_SOCKETS
    return number


async def read_numbers(front_end: PlayedFrontEnd, count: int) -> list[int]:
    return [(await front_end.read_output()).new_token_ids[0] for _ in range(count)]


async def test_replicas_are_not_read_beyond_so_many_messages(sockets: Path) -> None:
    async with slow_front_end(sockets, 1 << 30) as (fleet, front_end):
        said = say_until_paused(fleet)
        assert said >= MESSAGES_LIMIT
        assert all(link.paused for link in fleet.links.values())
        link, engine_id = fleet.run_of("a-1")
        link.say_outputs(outputs=[EngineCoreOutput(engine_id, [said])])
        assert await read_numbers(front_end, said + 1) == list(range(said + 1))
        assert not any(link.paused for link in fleet.links.values())


async def test_replicas_are_not_read_beyond_so_many_bytes(sockets: Path) -> None:
    async with slow_front_end(sockets, BYTES_LIMIT) as (fleet, front_end):
        said = say_until_paused(fleet, size=1000)
        assert said < MESSAGES_LIMIT
        assert await read_numbers(front_end, said) == list(range(said))
        await eventually(lambda: not fleet.links[0].paused, "reading again")
        # And again.
        assert say_until_paused(fleet, size=1000) < MESSAGES_LIMIT


async def test_requests_and_aborts_are_read_meanwhile(sockets: Path) -> None:
    async with slow_front_end(sockets, BYTES_LIMIT) as (fleet, front_end):
        say_until_paused(fleet, size=1000)
        await front_end.add("b-1")
        await fleet.has("a-1", "b-1")
        await front_end.abort("a-1")
        await fleet.has("b-1")


async def test_a_replica_that_joins_meanwhile_is_not_read_either(sockets: Path) -> None:
    async with slow_front_end(sockets, BYTES_LIMIT) as (fleet, front_end):
        said = say_until_paused(fleet, size=1000)
        joined = fleet.join(fleet.pool.add(2))
        assert joined.paused
        await read_numbers(front_end, said)
        await eventually(lambda: not joined.paused, "reading again")


@pytest.mark.parametrize("next_at_once", [True, False])
async def test_the_end_of_the_front_end_lets_replicas_be_read(sockets: Path, next_at_once: bool) -> None:
    async with slow_front_end(sockets, BYTES_LIMIT) as (fleet, _), PlayedFrontEnd(sockets) as second:
        link, engine_id = fleet.run_of("a-1")
        say_until_paused(fleet, size=1000)
        for number in range(1000):
            # They wait in the replica's socket, and are those of a request that nobody wants.
            link.say_outputs(outputs=[EngineCoreOutput(engine_id, [number] * 1000)])
        if not next_at_once:
            fleet.link.disconnect()
            await eventually(lambda: not link.paused, "reading again")
        fleet.link.connect(second.addresses, READY)
        await second.greeted()
        assert not any(link.paused for link in fleet.links.values())
        await second.add("b-1")
        await fleet.has("b-1")
        fleet.say("b-1", 7)
        assert (await second.read_output()).request_id == "b-1"


async def test_it_may_end_meanwhile(sockets: Path) -> None:
    async with slow_front_end(sockets, BYTES_LIMIT) as (fleet, _):
        say_until_paused(fleet, size=1000)
        fleet.link.close()
        await asyncio.wait_for(asyncio.wrap_future(fleet.link.ended), 10)
        assert not fleet.links[0].paused


def test_no_output_waits_for_an_event_that_has_passed(sockets: Path) -> None:
    """On the loop of the orchestrator's thread, with a reader that stops and goes on many times."""

    async def exchange() -> None:
        async with slow_front_end(sockets, BYTES_LIMIT) as (fleet, front_end):
            link, engine_id = fleet.run_of("a-1")
            sent = received = 0
            for turn in range(100):
                for _ in range(20 if turn % 3 else 200):
                    link.say_outputs(outputs=[EngineCoreOutput(engine_id, [sent] * 300)])
                    sent += 1
                for _ in range(turn * 7 % 100):
                    if received == sent:
                        break
                    assert (await front_end.read_output()).new_token_ids[0] == received
                    received += 1
            assert await read_numbers(front_end, sent - received) == list(range(received, sent))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange())
