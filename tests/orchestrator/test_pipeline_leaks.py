"""What many requests of every kind leave behind: nothing."""

import asyncio
import gc
import random
import threading

from tests.fakes.conditions import eventually
from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import SPEECH
from tests.fakes.transforms import raising
from vllm_omni_plugin.orchestrator import StageRun
from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput
from vllm_omni_plugin.orchestrator.multi_stage.request_state import PipelineRequestState

REQUESTS = 100
AT_ONCE = 25


def alive() -> int:
    """States of requests that anything still holds."""
    gc.collect()
    # Some libraries' objects warn when they are asked for what they are an instance of.
    return sum(type(each) in (PipelineRequestState, StageRun, ChunkedInput) for each in gc.get_objects())


async def one_lot(fleet: FakePipelineFleet, draw: random.Random, names: list[str]) -> None:
    """Some requests, of which some are aborted, fail in a transform, or lose replicas."""
    for name in names:
        modalities = draw.choice([("text",), ("audio",), ("text", "audio"), ()])
        params = {"talker": raising} if draw.random() < 0.2 else {}
        await fleet.submit(name, *modalities, params=params, prompt=[draw.randrange(9)], move="replay")
    for _ in range(40):
        at_work = sorted(fleet.at_work(list(fleet.states)))
        if at_work:
            await fleet.step(*draw.choice(at_work))
        if draw.random() < 0.1:
            await fleet.abort(draw.choice(names), whole=draw.random() < 0.5)
        if draw.random() < 0.1:
            stage_id = draw.randrange(3)
            fleet.lose(stage_id, draw.randrange(2))
            for member in fleet.pools[stage_id].members:
                if member not in fleet.pools[stage_id].serving:
                    fleet.join(member)
    await fleet.finish()


async def test_many_requests_leave_nothing_behind() -> None:
    draw, tasks, before = random.Random(7), asyncio.all_tasks(), alive()
    threads = set(threading.enumerate())
    async with FakePipelineFleet(SPEECH, replicas=2, migration_limit=1) as fleet:
        tasks_of_the_fleet = None
        for lot in range(0, REQUESTS, AT_ONCE):
            await one_lot(fleet, draw, [f"r{number}" for number in range(lot, lot + AT_ONCE)])
            tasks_of_the_fleet = tasks_of_the_fleet or asyncio.all_tasks()
            fleet.tokens.clear()
        ended = {type(end).__name__ for _, end in fleet.ends}
        # The second loss of a request is that of a suspect, or only one too many.
        assert ended - {"RequestLostError"} == {"str", "StageError", "QueryOfDeathError"}
        assert all(len(fleet.call_ends(name)) == 1 for name in fleet.events)
        fleet.events.clear()
        fleet.ends.clear()
        assert fleet.states == {}
        assert fleet.in_flight == 0
        assert fleet.orchestrator.metrics.held == 0
        assert all(not link.attempts for link in fleet.links.values())
        assert asyncio.all_tasks() == tasks_of_the_fleet
        # The threads' last work items may be kept until they take the next ones.
        assert alive() - before <= 2 * len(SPEECH) * 3
    assert asyncio.all_tasks() == tasks
    await eventually(lambda: set(threading.enumerate()) <= threads, "the end of all threads")
    await eventually(lambda: alive() <= before, "the freeing of what they held")
