"""Requests whose answer has begun when their replica is lost, and the limit on moves per second."""

import re
from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import VOCABULARY
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink
from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator.dispatch import move_budget
from vllm_omni_plugin.orchestrator.dispatch.move_budget import MoveBudget
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move

BEGUN = [11, 12, 13]


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=3) as fleet:
        yield fleet


async def begin(fleet: FakeFleet, move: str, **fields: object) -> None:
    """Submit request "a" and deliver the beginning of its answer in two outputs."""
    await fleet.submit("a", prompt=[1, 2], move=move, **fields)
    link, attempt = fleet.attempt("a")
    link.output(attempt, *BEGUN[:2])
    link.output(attempt, *BEGUN[2:])
    await fleet.read()


async def move_on(fleet: FakeFleet, move: str) -> tuple[FakeLink, str]:
    """Begin request "a" and lose its replica. Returns the link and the id of the next attempt."""
    await begin(fleet, move)
    fleet.attempt("a")[0].say_dead()
    return fleet.attempt("a")


def moves(fleet: FakeFleet) -> dict[Move, int]:
    return {move: count for move, count in fleet.orchestrator.metrics.request_moves.items() if count}


@pytest.mark.parametrize("cuts", [[1, 1, 1, 1, 1], [3, 2], [2, 3], [4, 1], [5]], ids=str)
async def test_a_replayed_request_goes_on_where_it_has_repeated_the_tokens_delivered(
    fleet: FakeFleet, cuts: list[int]
) -> None:
    link, attempt = await move_on(fleet, "replay")
    assert link.prompts[attempt] == [1, 2]
    whole = [*BEGUN, 14, 15]
    for length in cuts:
        tokens, whole = whole[:length], whole[length:]
        link.output(attempt, *tokens, finish_reason=None if whole else "stop")
    assert (await fleet.read())[-1] == ("a", "stop")
    assert fleet.tokens["a"] == [*BEGUN, 14, 15]
    assert fleet.in_flight == [0, 0, 0]
    assert (moves(fleet), fleet.orchestrator.metrics.tokens_swallowed) == ({Move.REPLAY: 1}, 3)


@pytest.mark.parametrize(
    ("outputs", "end"),
    [([[99]], None), ([[11, 99, 14]], None), ([[11], [12], [99]], None), ([[11, 12, 99, 14]], None), ([[11]], "stop")],
    ids=str,
)
async def test_a_replay_that_diverges_is_aborted_and_fails_once(
    fleet: FakeFleet, outputs: list[list[int]], end: str | None
) -> None:
    link, attempt = await move_on(fleet, "replay")
    for output in outputs:
        link.output(attempt, *output, finish_reason=end)
    link.output(attempt, 15, finish_reason="stop")
    error = await fleet.the_error("a")
    assert isinstance(error, RequestLostError)
    assert re.search(r"Replica \d was lost .*did not repeat.*send it again", str(error))
    assert link.aborted == [attempt]
    assert fleet.tokens["a"] == BEGUN
    assert (fleet.in_flight, fleet.orchestrator.request_states) == ([0, 0, 0], {})
    assert (
        fleet.orchestrator.metrics.replays_diverged,
        fleet.orchestrator.metrics.requests_failed["replica_lost"],
    ) == (1, 1)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_replay_that_the_engine_cuts_short_ends_as_the_engine_says(fleet: FakeFleet, reason: str) -> None:
    link, attempt = await move_on(fleet, "replay")
    link.output(attempt, BEGUN[0])
    link.output(attempt, 99, finish_reason=reason)
    assert await fleet.read() == [("a", reason)]
    assert fleet.tokens["a"] == BEGUN
    assert fleet.orchestrator.metrics.replays_diverged == 0


async def test_a_request_that_never_moves_fails_once(fleet: FakeFleet) -> None:
    await begin(fleet, "never")
    link, attempt = fleet.attempt("a")
    link.say_dead()
    link.output(attempt, 14, finish_reason="stop")
    error = await fleet.the_error("a")
    assert isinstance(error, RequestLostError)
    assert "died" in str(error) or "death" in str(error)
    assert "part of the answer had been delivered" in str(error)
    assert (fleet.in_flight, fleet.orchestrator.request_states) == ([0, 0, 0], {})
    assert fleet.orchestrator.metrics.requests_failed["replica_lost"] == 1


async def test_a_request_without_its_last_output_only_ends_without_another_replica(fleet: FakeFleet) -> None:
    await begin(fleet, "resume", length=3)
    fleet.attempt("a")[0].say_dead()
    assert await fleet.read() == [("a", "length")]
    assert (fleet.in_flight, fleet.orchestrator.request_states, moves(fleet)) == ([0, 0, 0], {}, {})


async def test_a_token_that_the_model_does_not_have_becomes_no_prompt(fleet: FakeFleet) -> None:
    await begin(fleet, "resume")
    home = fleet.home("a")
    await fleet.submit("b", affinity=home)
    link, attempt = fleet.attempt("a")
    link.output(attempt, VOCABULARY)
    link.output(fleet.attempt("b")[1], VOCABULARY - 1)
    await fleet.read()
    link.say_dead()
    error = await fleet.the_error("a")
    assert type(error) is RequestLostError
    assert str(error).startswith(f"Replica {home} was lost while it served this request")
    assert f"had sent token id {VOCABULARY}, which the model's vocabulary of {VOCABULARY} does not have" in str(error)
    assert [prompt for other in fleet.links.values() if other is not link for prompt in other.prompts.values()] == [
        [VOCABULARY - 1]
    ]
    assert fleet.orchestrator.metrics.requests_failed["replica_lost"] == 1


async def test_a_token_that_the_model_does_not_have_does_not_keep_a_request_from_replaying(fleet: FakeFleet) -> None:
    await begin(fleet, "replay")
    link, attempt = fleet.attempt("a")
    link.output(attempt, VOCABULARY)
    link.say_dead()
    link, attempt = fleet.attempt("a")
    assert link.prompts[attempt] == [1, 2]


def test_moves_beyond_the_budget_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_budget, "MOVES_AT_ONCE", 3)
    monkeypatch.setattr(move_budget, "MOVES_PER_S", 10.0)
    now = 0.0
    budget = MoveBudget(lambda: now)

    def spend() -> bool:
        if budget.has_one:
            budget.spend()
            return True
        return False

    assert [spend() for _ in range(4)] == [True, True, True, False]
    assert budget.next_at == pytest.approx(0.1)
    now = 0.35
    assert [spend() for _ in range(4)] == [True, True, True, False]
    assert budget.next_at == pytest.approx(0.45)


async def test_requests_of_lost_replicas_wait_for_the_budget_in_order_and_may_be_aborted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(move_budget, "MOVES_AT_ONCE", 2)
    async with FakeFleet(replicas=1) as fleet:
        for name in "abcd":
            await fleet.submit(name)
            fleet.say(name, 5)
        fleet.join(fleet.pool.add())
        fleet.kill(0)
        assert (fleet.in_flight, fleet.orchestrator.metrics.moves_waiting) == ([0, 2], 2)
        assert all(fleet.attempt(name)[0] is fleet.links[1] for name in "ab")
        await fleet.abort("c")
        fleet.now = 1.0
        await eventually(lambda: fleet.in_flight == [0, 3], "the last move")
        assert fleet.orchestrator.metrics.moves_waiting == 0


async def test_a_head_that_has_ended_makes_no_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_budget, "MOVES_AT_ONCE", 1)
    async with FakeFleet(replicas=1) as fleet:
        for name in "abc":
            await fleet.submit(name)
            fleet.say(name, 5)
        fleet.join(fleet.pool.add())
    # It has ended by now, and has no timer.
    fleet.lose(0)
    assert fleet.in_flight == [0, 1]
    fleet.now = 1.0
    assert fleet.in_flight == [0, 1]
