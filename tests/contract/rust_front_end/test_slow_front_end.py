"""A front end that lags: nothing is lost or out of order."""

import asyncio
from pathlib import Path

import uvloop
from vllm.v1.engine import EngineCoreOutput

from .played import READY, PlayedFrontEnd, RustFleet


def test_no_output_waits_for_an_event_that_has_passed(sockets: Path) -> None:
    """On the loop of the orchestrator's thread, with a reader that stops and goes on many times."""

    async def exchange() -> None:
        async with RustFleet() as fleet, PlayedFrontEnd(sockets, unread=1) as front_end:
            fleet.link.connect(front_end.addresses, READY)
            await front_end.greeted()
            await front_end.add("a-1")
            await fleet.has("a-1")
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
            rest = [(await front_end.read_output()).new_token_ids[0] for _ in range(sent - received)]
            assert rest == list(range(received, sent))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange())
