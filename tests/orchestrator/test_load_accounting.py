"""What users of other balancers report of their load accounting, each complaint as a test of ours."""

import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer, ReplicaLoad
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=3, balancer=LeastQueueLengthBalancer(random.Random(1))) as fleet:
        yield fleet


def loads(fleet: FakeFleet) -> list[ReplicaLoad]:
    return [member.load for member in fleet.pool.members]


def home_of(fleet: FakeFleet, request_id: str) -> PoolMember:
    return fleet.pool.member(fleet.home(request_id))


def idle(load: ReplicaLoad) -> bool:
    return (load.requests, load.prefill_tokens, load.decode_tokens) == (0, 0, 0)


@pytest.mark.parametrize("begun", [False, True], ids=["before the first output", "while it streams"])
async def test_counters_that_leak_on_client_abort(fleet: FakeFleet, begun: bool) -> None:
    """router#215, ps#1072: a client that disconnects leaves its request counted for ever."""
    for index in range(30):
        await fleet.submit(f"r{index}", prompt=[1] * 50)
        if begun:
            fleet.say(f"r{index}", 1, 2)
        await fleet.abort(f"r{index}")
        await fleet.abort(f"r{index}")
    assert all(map(idle, loads(fleet)))


async def test_counters_that_leak_when_a_replica_is_lost(fleet: FakeFleet) -> None:
    """router#215, ps#1072, the same for the other ways a request can end: loss, move, error."""
    await fleet.submit("a", prompt=[1] * 50, move="never")
    await fleet.submit("b", prompt=[1] * 50)
    await fleet.submit("c", prompt=[1] * 50)
    for name in "abc":
        fleet.say(name, 1)
    fleet.attempt("a")[0].say_dead()
    fleet.attempt("b")[0].say_dead()
    assert sum(load.requests for load in loads(fleet)) == 2
    for name in "bc":
        fleet.say(name, finish_reason="error")
    assert all(map(idle, loads(fleet)))


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


async def test_counters_that_are_charged_only_when_the_stream_starts(fleet: FakeFleet) -> None:
    """sglang#27547, vllm-omni 0.30: a burst is placed before the first of its requests counts."""
    for index in range(30):
        await fleet.submit(f"r{index}", prompt=[1] * 50)
    assert [(load.requests, load.prefill_tokens) for load in loads(fleet)] == [(10, 500)] * 3


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


async def test_a_rate_that_is_taken_for_a_load(fleet: FakeFleet) -> None:
    """ps#1073: a saturated engine completes little, is asked little, and so seems to be the idlest one."""
    await fleet.submit("stuck")
    stuck = fleet.home("stuck")
    for index in range(30):
        # The others answer at once, and their rates grow.
        fleet.now += 10.0
        await fleet.submit(f"r{index}")
        fleet.say(f"r{index}", finish_reason="stop")
    assigned = [member.dispatches for member in fleet.pool.members]
    assert assigned.pop(stuck) == 1
    assert sum(assigned) == 30


@pytest.mark.parametrize("replicas", [3, 20], ids=["searched", "indexed"])
async def test_a_fixed_tie_break_that_favours_one_replica(replicas: int) -> None:
    """vllm#47420: an idle fleet sends every request to its first replica."""
    async with FakeFleet(replicas, LeastQueueLengthBalancer(random.Random(1))) as fleet:
        for index in range(40 * replicas):
            await fleet.submit(f"r{index}")
            fleet.say(f"r{index}", finish_reason="stop")
        picks = Counter({member.replica_id: member.dispatches for member in fleet.pool.members})
    # Four standard deviations around 40; the seed makes the counts the same in every run.
    assert all(15 <= picks[replica_id] <= 65 for replica_id in range(replicas)), picks
