"""What users of other balancers report of their load accounting, each complaint as a test of ours."""

import random
from collections.abc import AsyncIterator

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer, ReplicaLoad
from vllm_omni_plugin.orchestrator import PoolMember


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=3, balancer=LeastQueueLengthBalancer(random.Random(1))) as fleet:
        yield fleet


def loads(fleet: FakeFleet) -> list[ReplicaLoad]:
    return [member.load for member in fleet.pool.members]


def home_of(fleet: FakeFleet, request_id: str) -> PoolMember:
    return fleet.pool.member(fleet.home(request_id))


async def test_counters_that_are_reset_by_health_checks_and_reports(fleet: FakeFleet) -> None:
    """router#197: a health check that finds a worker well sets its load to what it knows, which is nothing."""
    for index in range(9):
        await fleet.submit(f"r{index}", prompt=[1] * 50)
    before = loads(fleet)
    for member, link in zip(fleet.pool.members, fleet.links.values(), strict=True):
        link.report(running=0)
        fleet.pool.cordon(member, "suspect")
        fleet.pool.uncordon(member, "suspect")
    assert loads(fleet) == before
    assert [load.requests for load in before] == [3, 3, 3]


async def test_counters_that_are_overwritten_by_an_older_snapshot(fleet: FakeFleet) -> None:
    """vllm#48027: a report erases what was assigned after it was taken."""
    for index in range(6):
        await fleet.submit(f"r{index}")
    # Each engine had seen one of its two requests when it reported.
    for name in ("r0", "r1", "r2"):
        link, attempt = fleet.attempt(name)
        link.output(attempt, running=1)
    assert [load.requests for load in loads(fleet)] == [2, 2, 2]
    for link in fleet.links.values():
        link.report(running=2)
    assert [load.requests for load in loads(fleet)] == [2, 2, 2]


async def test_a_report_of_other_heads_requests_is_added_and_not_taken_for_ours(fleet: FakeFleet) -> None:
    """vllm#48027, the other way round: what is not ours counts until the next report, and never twice."""
    for index in range(3):
        await fleet.submit(f"r{index}")
    link, attempt = fleet.attempt("r0")
    home = home_of(fleet, "r0")
    link.output(attempt, running=5)
    assert (home.load.requests, home.load.others) == (5, 4)
    link.output(attempt, running=3)
    assert (home.load.requests, home.load.others) == (3, 2)
    link.output(attempt, finish_reason="stop", running=2)
    assert (home.load.requests, home.load.others) == (0, 0)


async def test_a_report_counts_without_what_finished_in_the_same_message(fleet: FakeFleet) -> None:
    """vllm#48027: of one message, the end of a request is heeded before the report, which no longer has it."""
    for index in range(6):
        await fleet.submit(f"r{index}")
    link, attempt = fleet.attempt("r0")
    home = home_of(fleet, "r0")
    # One of ours is left, and two of another head's.
    link.output(attempt, finish_reason="stop", running=3)
    assert (home.load.requests, home.load.others) == (3, 2)
