"""So many moves per second, in order."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.orchestrator import move_line
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.move_line import MoveLine
from vllm_omni_plugin.orchestrator.stage_run import StageRun


class Moves:
    """A line of three moves at once and ten per second, and what has moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = OrchestratorMetrics()
        self.line = MoveLine(lambda: self.now, self.metrics)
        self.runs = [StageRun(cast(object, None), 0.0) for _ in range(6)]
        self.moved: list[int] = []

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.line.add(self.runs[number], lambda run: self.moved.append(self.runs.index(run)))


@pytest.fixture
async def moves(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Moves]:
    monkeypatch.setattr(move_line, "MOVES_AT_ONCE", 3)
    monkeypatch.setattr(move_line, "MOVES_PER_S", 10.0)
    moves = Moves()
    yield moves
    moves.line.close()


async def test_those_beyond_the_budget_wait_in_order(moves: Moves) -> None:
    moves.add(0, 1, 2, 3, 4)
    assert (moves.moved, moves.metrics.moves_waiting) == ([0, 1, 2], 2)
    moves.now = 0.1
    await eventually(lambda: moves.moved == [0, 1, 2, 3], "the next move")
    moves.add(5)
    assert moves.metrics.moves_waiting == 2
    moves.now = 0.35
    await eventually(lambda: moves.moved == [0, 1, 2, 3, 4, 5], "the last moves")
    assert moves.metrics.moves_waiting == 0


async def test_a_quiet_time_allows_so_many_at_once_and_no_more(moves: Moves) -> None:
    moves.now = 3600.0
    moves.add(0, 1, 2, 3)
    assert moves.moved == [0, 1, 2]


async def test_one_that_does_not_move_any_more_costs_nothing(moves: Moves) -> None:
    moves.add(0, 1, 2, 3, 4)
    moves.line.remove(moves.runs[3])
    moves.now = 0.1
    await eventually(lambda: moves.moved == [0, 1, 2, 4], "the move behind it")
    moves.line.remove(moves.runs[0])
    assert moves.metrics.moves_waiting == 0


async def test_a_line_that_is_closed_moves_nobody_later(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    moves.line.close()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *_: pytest.fail("a timer is set"))
    moves.add(0, 1, 2, 3)
    assert moves.moved == [0, 1, 2]


async def test_requests_of_lost_replicas_wait_for_the_budget_and_may_be_aborted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(move_line, "MOVES_AT_ONCE", 2)
    async with FakeFleet(replicas=1) as fleet:
        for name in "abcd":
            await fleet.submit(name)
            link, attempt = fleet.attempt(name)
            link.output(attempt, 5)
        fleet.join(fleet.pool.add())
        fleet.lose(0)
        assert (fleet.in_flight, fleet.orchestrator.metrics.moves_waiting) == ([0, 2], 2)
        await fleet.abort("c")
        fleet.now = 1.0
        await eventually(lambda: fleet.in_flight == [0, 3], "the last move")
        assert fleet.orchestrator.metrics.moves_waiting == 0


async def test_a_request_gets_past_any_number_of_dead_replicas() -> None:
    async with FakeFleet(replicas=500, migration_limit=500) as fleet:
        for link in fleet.links.values():
            link.broken = True
        fleet.links[499].broken = False
        await fleet.submit("a", affinity=0)
        assert fleet.attempt("a")[0] is fleet.links[499]
