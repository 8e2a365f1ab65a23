"""The limit on moves per second."""

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.orchestrator.dispatch import move_budget
from vllm_omni_plugin.orchestrator.dispatch.move_budget import MoveBudget


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
