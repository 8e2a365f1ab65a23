"""Outputs that AsyncLLM cannot process: their request fails, and the second from one replica takes it out."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, OutputUnusable


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=3, replica_wait=600.0) as fleet:
        yield fleet


async def poison(fleet: FakeFleet, replica_id: int, request_id: str = "bad") -> None:
    """A request's output comes from a replica, and AsyncLLM's side fails the request over it."""
    await fleet.submit(request_id, affinity=[member.replica_id for member in fleet.pool.serving].index(replica_id))
    link, attempt = fleet.attempt(request_id)
    assert link is fleet.links[replica_id]
    link.output(attempt, 5)
    await complain(fleet, replica_id, request_id)


async def complain(fleet: FakeFleet, replica_id: int, request_id: str = "bad") -> None:
    queue = fleet.orchestrator.front_end.request_async_queue
    queue.put(AbortRequests((request_id,), whole=True))
    queue.put(OutputUnusable(request_id, replica_id, "IndexError: no such column"))
    await eventually(lambda: len(queue) == 0, "the taking of the messages")


def status(fleet: FakeFleet) -> list[str]:
    return ["up" if member.status is ReplicaStatus.UP else "out" for member in fleet.pool.members]


async def test_the_first_fails_only_its_request(fleet: FakeFleet, caplog: pytest.LogCaptureFixture) -> None:
    for replica_id in range(3):
        await poison(fleet, replica_id)
    assert status(fleet) == ["up", "up", "up"]
    assert "Replica 0.1 stays in service (its output for request bad could not be processed: IndexEr" in caplog.text
    assert fleet.orchestrator.request_states == {}


async def test_at_the_second_the_other_requests_of_the_replica_move(
    fleet: FakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.submit("begun", affinity=1, prompt=[1, 2])
    fleet.say("begun", 11)
    await fleet.submit("new", affinity=1)
    await poison(fleet, 1)
    await poison(fleet, 1)
    assert status(fleet) == ["up", "out", "up"]
    assert fleet.pool.member(1).status is ReplicaStatus.ERROR
    assert "Replica 0.1 is lost (its output for request bad could not be processed: IndexEr" in caplog.text
    assert sorted(fleet.orchestrator.request_states) == ["begun", "new"]
    for request_id in ("begun", "new"):
        link, attempt = fleet.attempt(request_id)
        assert link is not fleet.links[1]
        link.output(attempt, 12, finish_reason="stop")
    assert [end for end in await fleet.read() if end[1]] == [("begun", "stop"), ("new", "stop")]
    assert fleet.tokens["begun"] == [11, 12]
    # Nobody is suspected of having broken it.
    assert fleet.orchestrator.metrics.moves_waiting == 0


async def test_a_second_one_after_more_than_a_minute_counts_as_the_first(fleet: FakeFleet) -> None:
    await poison(fleet, 0)
    fleet.now += 61.0
    await poison(fleet, 0)
    assert status(fleet) == ["up", "up", "up"]
    fleet.now += 59.0
    await poison(fleet, 0)
    assert status(fleet) == ["out", "up", "up"]


async def test_the_only_replica_that_serves_is_kept(fleet: FakeFleet) -> None:
    fleet.pool.cordon(fleet.pool.member(0), "drain")
    fleet.kill(2)
    await poison(fleet, 1)
    await poison(fleet, 1)
    assert [member.replica_id for member in fleet.pool.serving] == [1]


async def test_a_rank_of_a_lockstep_group_is_kept(fleet: FakeFleet) -> None:
    fleet.pool.lockstep = True
    await poison(fleet, 1)
    await poison(fleet, 1)
    assert status(fleet) == ["up", "up", "up"]


async def test_a_late_output_of_a_lost_replica_takes_out_no_replica(fleet: FakeFleet) -> None:
    fleet.kill(0)
    await complain(fleet, 0)
    fleet.kill(1)
    fleet.orchestrator.replica_left(fleet.pool.member(1))
    await complain(fleet, 1)
    assert status(fleet) == ["out", "up"]
