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


def calls_of(fleet: FakePipelineFleet, stage_id: int, replica_id: int = 0) -> list[str]:
    return [method for _, method, _ in fleet.links[stage_id, replica_id].calls]


def answer(link: FakeLink) -> None:
    call_id, method, _ = link.calls[-1]
    link.answer(call_id, method)


async def begun(fleet: FakePipelineFleet) -> None:
    """Calls are begun in order: when this one has been answered, those before it have come as far as they can."""
    await fleet.call("is_sleeping")


async def until_called(fleet: FakePipelineFleet, *stage_ids: int) -> None:
    await eventually(lambda: all(calls_of(fleet, stage_id) for stage_id in stage_ids), "the call")


@pytest.mark.parametrize("rest", WAITS)
async def test_a_stage_is_paused_when_it_has_ended_the_work_from_its_paused_inputs(rest: tuple[Any, ...]) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r")
        resting = asyncio.wrap_future(fleet.ask(*rest))
        await until_called(fleet, 0)
        # The first stage drains, and what it has made is on its way.
        await fleet.step("r", 0, count=9)
        await fleet.submit("new")
        answer(fleet.links[0, 0])
        await fleet.settle()
        assert calls_of(fleet, 1) == []
        fleet.links[1, 0].on_call = answer_calls
        await fleet.step("r", 1, count=9)
        assert await results(resting) == [rest[0]] * 2
        assert fleet.ends == [("r", "stop")]
        assert fleet.states.keys() == {"new"}


@pytest.mark.parametrize("rest", ABORTS)
async def test_work_between_two_stages_reaches_the_next_stage_before_its_abort(rest: tuple[Any, ...]) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.links[1, 0].on_call = answer_calls
        await fleet.submit("r")
        resting = asyncio.wrap_future(fleet.ask(*rest))
        await until_called(fleet, 0)
        assert calls_of(fleet, 1) == []
        fleet.links[0, 0].step(fleet.attempt("r", 0)[1], 9)
        answer(fleet.links[0, 0])
        assert await results(resting) == [rest[0]] * 2
        assert fleet.links[1, 0].added == [fleet.attempt("r", 1)[1]]


async def test_a_stage_is_aborted_when_its_inputs_have_been_built_and_sent(gate: threading.Event) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text", params={"refiner": lambda transfer: gate.wait(30) and [7]})
        first, attempt = fleet.attempt("r", 0)
        first.step(attempt, 9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "abort", True))
        await begun(fleet)
        assert (calls_of(fleet, 0), calls_of(fleet, 1)) == (["pause_scheduler", "is_sleeping"], ["is_sleeping"])
        gate.set()
        assert await results(resting) == ["pause_scheduler"] * 2
        assert fleet.links[1, 0].added == [fleet.attempt("r", 1)[1]]


@pytest.mark.parametrize("rest", [("pause_scheduler", "keep", True), ("sleep", 1, "keep"), ("resume_scheduler",)])
async def test_keep_and_wake_up_reach_all_stages_at_once(rest: tuple[Any, ...]) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r")
        resting = asyncio.wrap_future(fleet.ask(*rest))
        await until_called(fleet, 0, 1)
        resting.cancel()


async def test_chunks_that_are_on_their_way_reach_the_end() -> None:
    async with FakePipelineFleet(SPEECH) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text", "audio")
        fleet.links[0, 0].on_call = None
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await until_called(fleet, 0)
        await fleet.step("r", 0, count=9)
        answer(fleet.links[0, 0])
        await fleet.settle()
        assert (calls_of(fleet, 1), calls_of(fleet, 2)) == ([], [])
        await fleet.finish()
        await results(resting)
        assert (calls_of(fleet, 1), calls_of(fleet, 2)) == (["pause_scheduler"], ["pause_scheduler"])
        assert fleet.call_ends("r") == [None]


@pytest.mark.parametrize("end", ["abort", "lost"])
async def test_a_pause_does_not_wait_for_a_request_that_ends_early(end: str) -> None:
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
async def test_a_later_call_ends_a_pause_in_progress(
    later: tuple[Any, ...],
) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r")
        await fleet.step("r", 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await until_called(fleet, 0)
        assert await fleet.call(*later) == [later[0]] * 2
        await fleet.finish()
        assert await results(resting) == ["pause_scheduler"]
        assert calls_of(fleet, 1) == [later[0]]


async def test_a_prompt_that_skips_its_prefill_is_ended_by_the_stage_behind() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", prompt=[1, 2])
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        await fleet.submit("new", prompt=[1, 2])
        assert calls_of(fleet, 1) == ["is_sleeping"]
        await fleet.finish("r")
        assert await results(resting) == ["pause_scheduler"] * 2
        assert fleet.states.keys() == {"new"}


async def test_a_stage_without_replicas_is_called_with_its_upstream_stage() -> None:
    async with FakePipelineFleet(SPEECH, replicas=[1, 0, 1], replica_wait=600.0) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text", "audio")
        await fleet.step("r", 0, count=9)
        assert await fleet.call("pause_scheduler", "wait", True) == ["pause_scheduler"] * 2
        assert [method for method, _ in await fleet.replayed(1)] == ["pause_scheduler"]


async def test_a_stage_is_paused_after_its_last_work_in_flight() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.answer_with(answer_calls)
        for name in "ab":
            await fleet.submit(name)
            await fleet.step(name, 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        await fleet.step("a", 1, count=9)
        await begun(fleet)
        assert calls_of(fleet, 1) == ["is_sleeping"] * 2
        await fleet.step("b", 1, count=9)
        assert await results(resting) == ["pause_scheduler"] * 2
        assert fleet.ends == [("a", "stop"), ("b", "stop")]


async def test_a_pause_waits_neither_for_downstream_stages_nor_for_unneeded_stages() -> None:
    critic = stage(4, "critic", "scores", "thinker", final=True)
    async with FakePipelineFleet((*DIAMOND, critic)) as fleet:
        fleet.answer_with(answer_calls)
        await fleet.submit("r", "text")
        await fleet.step("r", 0, count=9)
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await begun(fleet)
        await fleet.step("r", 1, count=9)
        await begun(fleet)
        assert [calls_of(fleet, stage_id) for stage_id in (1, 2, 4)] == [["is_sleeping"] * 2] * 3
        await fleet.step("r", 2, count=9)
        await begun(fleet)
        rested = ["is_sleeping", "is_sleeping", "pause_scheduler", "is_sleeping"]
        assert [calls_of(fleet, stage_id) for stage_id in (1, 2, 4)] == [rested] * 3
        assert calls_of(fleet, 3) == ["is_sleeping"] * 3
        await fleet.finish()
        assert await results(resting) == ["pause_scheduler"] * 5


async def test_a_request_held_by_a_paused_stage_delays_no_later_stage() -> None:
    async with FakePipelineFleet(JOIN) as fleet:
        fleet.answer_with(answer_calls)
        fleet.links[0, 0].on_call = None
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        await until_called(fleet, 0, 1)
        # The second stage is at rest by now, the first one works on.
        await fleet.submit("r")
        await fleet.step("r", 0, count=9)
        answer(fleet.links[0, 0])
        assert await results(resting) == ["pause_scheduler"] * 3
        assert fleet.states.keys() == {"r"}


async def test_stages_are_paused_in_sequence_even_if_some_have_no_replicas() -> None:
    async with FakePipelineFleet(DIAMOND, replicas=[1, 0, 1, 1]) as fleet:
        resting = asyncio.wrap_future(fleet.ask("pause_scheduler", "wait", True))
        for stage_id, behind in ((0, (2, 3)), (2, (3,)), (3, ())):
            await until_called(fleet, stage_id)
            assert [calls_of(fleet, later) for later in behind] == [[]] * len(behind)
            answer(fleet.links[stage_id, 0])
        assert await results(resting) == ["pause_scheduler"] * 3
