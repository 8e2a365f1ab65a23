"""Calls that bring a pipeline to rest: what is on its way between two stages is neither lost nor left there."""

import asyncio
import threading
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink, answer_calls
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from tests.fakes.pipelines import CHAIN, DIAMOND, DISAGGREGATED, JOIN, SPEECH

WAITS = [("pause_scheduler", "wait", True), ("pause_generation", "wait", True), ("sleep", 1, "wait")]
ABORTS = [
    ("pause_scheduler",),
    ("pause_scheduler", "abort", True),
    ("pause_generation",),
    ("sleep",),
    ("sleep", 0),
    ("sleep", 1, "abort"),
]
REPLACES = [
    ("resume_scheduler",),
    ("wake_up", None),
    ("pause_scheduler", "keep", True),
    ("pause_generation", "keep", True),
    ("sleep", 0, "keep"),
]


async def results(resting: "asyncio.Future[list[Any]]") -> list[Any]:
    async with asyncio.timeout(10):
        return await resting


def told(fleet: FakePipelineFleet, stage_id: int, replica_id: int = 0) -> list[str]:
    return [method for _, method, _ in fleet.links[stage_id, replica_id].calls]


def answer(link: FakeLink) -> None:
    call_id, method, _ = link.calls[-1]
    link.answer(call_id, method)


async def begun(fleet: FakePipelineFleet) -> None:
    """Calls are begun in order: when this one has been answered, those before it have come as far as they can."""
    await fleet.call("is_sleeping")


async def until_told(fleet: FakePipelineFleet, *stage_ids: int) -> None:
    await eventually(lambda: all(told(fleet, stage_id) for stage_id in stage_ids), "the call")


@pytest.mark.parametrize("rest", WAITS)
async def test_a_stage_rests_when_it_has_ended_what_those_in_front_have_let_go(rest: tuple[Any, ...]) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r")
        resting = asyncio.wrap_future(fleet.ask(*rest))
        await until_told(fleet, 0)
        # The first stage drains, and what it has made is on its way.
        await fleet.step("r", 0, count=9)
        await fleet.submit("new")
        answer(fleet.links[0, 0])
        await fleet.settle()
        assert told(fleet, 1) == []
        fleet.links[1, 0].on_call = answer_calls
        await fleet.step("r", 1, count=9)
        assert await results(resting) == [rest[0]] * 2
        assert fleet.ends == [("r", "stop")]
        assert fleet.states.keys() == {"new"}


@pytest.mark.parametrize("rest", ABORTS)
async def test_what_is_on_its_way_is_given_to_a_stage_before_that_aborts_it(rest: tuple[Any, ...]) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.links[1, 0].on_call = answer_calls
        await fleet.submit("r")
        resting = asyncio.wrap_future(fleet.ask(*rest))
        await until_told(fleet, 0)
        assert told(fleet, 1) == []
        fleet.links[0, 0].step(fleet.attempt("r", 0)[1], 9)
        answer(fleet.links[0, 0])
        assert await results(resting) == [rest[0]] * 2
        assert fleet.links[1, 0].added == [fleet.attempt("r", 1)[1]]


async def test_a_stage_is_told_to_abort_when_what_is_still_prepared_for_it_has_arrived_and_not_ended() -> None:
    gate = threading.Event()
    try:
        async with FakePipelineFleet(CHAIN) as fleet:
            fleet.answer_with(answer_calls)
            await fleet.submit("r", "text", params={"refiner": lambda transfer: gate.wait(30) and [7]})
            first, attempt = fleet.attempt("r", 0)
            first.step(attempt, 9)
            resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "abort", True))
            await begun(fleet)
            assert (told(fleet, 0), told(fleet, 1)) == (["pause_scheduler", "is_sleeping"], ["is_sleeping"])
            gate.set()
            assert await results(resting) == ["pause_scheduler"] * 2
            assert fleet.links[1, 0].added == [fleet.attempt("r", 1)[1]]
    finally:
        gate.set()


@pytest.mark.parametrize("rest", [("pause_scheduler", "keep", True), ("sleep", 1, "keep"), ("resume_scheduler",)])
async def test_what_freezes_or_wakes_the_stages_reaches_them_at_once(rest: tuple[Any, ...]) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r")
        resting = asyncio.wrap_future(fleet.ask(*rest))
        await until_told(fleet, 0, 1)
        resting.cancel()


async def test_chunks_that_are_on_their_way_reach_the_end() -> None:
    async with FakePipelineFleet(SPEECH) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text", "audio")
        fleet.links[0, 0].on_call = None
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await until_told(fleet, 0)
        await fleet.step("r", 0, count=9)
        answer(fleet.links[0, 0])
        await fleet.settle()
        assert (told(fleet, 1), told(fleet, 2)) == ([], [])
        await fleet.finish()
        await results(resting)
        assert (told(fleet, 1), told(fleet, 2)) == (["pause_scheduler"], ["pause_scheduler"])
        assert fleet.call_ends("r") == [None]


@pytest.mark.parametrize("end", ["abort", "lost"])
async def test_a_request_that_ends_early_is_waited_for_no_longer(end: str) -> None:
    async with FakePipelineFleet(CHAIN, replicas=[1, 2], migration_limit=0) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r")
        await fleet.step("r", 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        if end == "abort":
            await fleet.abort("r")
        else:
            fleet.attempt("r", 1)[0].say_dead()
        assert len(await results(resting)) == (3 if end == "abort" else 2)


@pytest.mark.parametrize("later", REPLACES)
async def test_a_pipeline_that_is_told_otherwise_while_it_comes_to_rest_rests_no_further(
    later: tuple[Any, ...],
) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r")
        await fleet.step("r", 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await until_told(fleet, 0)
        assert await fleet.call(*later) == [later[0]] * 2
        await fleet.finish()
        assert await results(resting) == ["pause_scheduler"]
        assert told(fleet, 1) == [later[0]]


async def test_a_prompt_that_skips_its_prefill_is_ended_by_the_stage_behind() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", prompt=[1, 2])
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        await fleet.submit("new", prompt=[1, 2])
        assert told(fleet, 1) == ["is_sleeping"]
        await fleet.finish("r")
        assert await results(resting) == ["pause_scheduler"] * 2
        assert fleet.states.keys() == {"new"}


async def test_a_stage_without_replicas_is_told_with_the_one_in_front_and_holds_nothing_up() -> None:
    async with FakePipelineFleet(SPEECH, replicas=[1, 0, 1], replica_wait=600.0) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text", "audio")
        await fleet.step("r", 0, count=9)
        assert await fleet.call("pause_scheduler", "wait", True) == ["pause_scheduler"] * 2
        assert [method for method, _ in await fleet.told(1)] == ["pause_scheduler"]


async def test_a_stage_rests_when_it_has_ended_the_last_of_what_was_on_its_way() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.answer_with(answer_calls)
        for name in "ab":
            await fleet.submit(name)
            await fleet.step(name, 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        await fleet.step("a", 1, count=9)
        await begun(fleet)
        assert told(fleet, 1) == ["is_sleeping"] * 2
        await fleet.step("b", 1, count=9)
        assert await results(resting) == ["pause_scheduler"] * 2
        assert fleet.ends == [("a", "stop"), ("b", "stop")]


async def test_a_stage_waits_neither_for_those_behind_it_nor_for_what_a_request_does_not_need() -> None:
    critic = stage(4, "critic", "scores", "thinker", final=True)
    async with FakePipelineFleet((*DIAMOND, critic)) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text")
        await fleet.step("r", 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        await fleet.step("r", 1, count=9)
        await begun(fleet)
        assert [told(fleet, stage_id) for stage_id in (1, 2, 4)] == [["is_sleeping"] * 2] * 3
        await fleet.step("r", 2, count=9)
        await begun(fleet)
        rested = ["is_sleeping", "is_sleeping", "pause_scheduler", "is_sleeping"]
        assert [told(fleet, stage_id) for stage_id in (1, 2, 4)] == [rested] * 3
        assert told(fleet, 3) == ["is_sleeping"] * 3
        await fleet.finish()
        assert await results(resting) == ["pause_scheduler"] * 5


async def test_a_request_that_a_paused_stage_holds_holds_up_none_of_the_stages_behind() -> None:
    async with FakePipelineFleet(JOIN) as fleet:
        fleet.answer_with(answer_calls)
        fleet.links[0, 0].on_call = None
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await until_told(fleet, 0, 1)
        # The second stage is at rest by now, the first one works on.
        await fleet.submit("r")
        await fleet.step("r", 0, count=9)
        answer(fleet.links[0, 0])
        assert await results(resting) == ["pause_scheduler"] * 3
        assert fleet.states.keys() == {"r"}


async def test_stages_rest_one_after_the_other_also_where_some_have_no_replicas() -> None:
    async with FakePipelineFleet(DIAMOND, replicas=[1, 0, 1, 1]) as fleet:
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        for stage_id, behind in ((0, (2, 3)), (2, (3,)), (3, ())):
            await until_told(fleet, stage_id)
            assert [told(fleet, later) for later in behind] == [[]] * len(behind)
            answer(fleet.links[stage_id, 0])
        assert await results(resting) == ["pause_scheduler"] * 3
