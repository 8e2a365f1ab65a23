"""The first head and its coordinator are killed and come back; another head has streams on all replicas."""

import asyncio
import os
import signal
from dataclasses import replace

from tests.fakes.conditions import eventually
from tests.sim.protocol.requests import request
from tests.sim.protocol.whole_heads import SETTINGS, WholeHead, open_nodes
from vllm_omni_plugin.coordinator import OmniCoordinatorRuntime
from vllm_omni_plugin.orchestrator.event_log import EventKind

REPLICAS, STREAMS = 16, 48
ENDLESS = 90_000


def addresses(head: WholeHead) -> dict[str, str]:
    """The replicas of a head by name."""
    return {member.name: member.input_addr for member in head.pool.members}


async def each_goes_on(head: WholeHead) -> None:
    before = dict(head.produced)
    await eventually(lambda: all(head.produced[name] > count for name, count in before.items()), "all streams go on")


async def test_no_stream_of_a_joined_head_moves_and_no_replica_is_renumbered() -> None:
    runtime = await asyncio.to_thread(OmniCoordinatorRuntime, heartbeat_timeout=3.0)
    address = runtime.router_address
    try:
        async with open_nodes(address, REPLICAS, replace(SETTINGS, step_s=0.02)) as new_head, new_head() as joined:
            async with new_head() as first:
                names = addresses(joined)
                assert addresses(first) == names
                joined.submit(*[request(f"stream-{number}", max_tokens=ENDLESS) for number in range(STREAMS)])
                await eventually(lambda: len(joined.produced) == STREAMS, "all streams have begun")
                assert runtime.process_id is not None
                os.kill(runtime.process_id, signal.SIGKILL)
            await asyncio.to_thread(runtime.close)
            await each_goes_on(joined)
            port = int(address.rpartition(":")[2])
            runtime = await asyncio.to_thread(OmniCoordinatorRuntime, port=port, heartbeat_timeout=3.0)
            async with new_head() as successor:
                assert addresses(successor) == names
                await each_goes_on(joined)
            assert joined.ended == {}
            assert addresses(joined) == names
            kinds = {event.kind for event in joined.orchestrator.events.after()}
            assert kinds == {EventKind.ATTACH}
    finally:
        await asyncio.to_thread(runtime.close)
