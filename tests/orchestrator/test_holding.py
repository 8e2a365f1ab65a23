"""Requests that find no replica serving: held in order, then sent or refused."""

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.observations import observed
from vllm_omni_plugin.balancing import LoadBalancer, PrefixBalancer, RoundRobinBalancer
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.dispatch.next_step import MAX_HELD_REQUESTS
from vllm_omni_plugin.orchestrator.dispatch.stage_situation import RETURN_INTERVAL_S
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

LONG = 600.0
SHORT = 0.02


async def test_requests_are_held_in_order_until_a_replica_serves() -> None:
    async with FakeFleet(replicas=1, replica_wait=LONG) as fleet:
        fleet.lose(0)
        for name in "abc":
            await fleet.submit(name)
            fleet.now += 2.0
        assert (await fleet.read(), fleet.orchestrator.metrics.held) == ([], 3)
        link = fleet.join(fleet.pool.member(0))
        assert [fleet.attempt(name)[1] for name in "abc"] == link.added
        metrics = fleet.orchestrator.metrics
        assert (metrics.held, observed(metrics.hold_time_seconds)) == (0, (3, 12.0))


async def test_a_request_held_in_vain_is_refused_with_the_time_it_waited() -> None:
    async with FakeFleet(replicas=1, replica_wait=SHORT) as fleet:
        fleet.lose(0)
        await fleet.submit("a")
        fleet.now = 60.0
        await eventually(lambda: not fleet.orchestrator.request_states, "the refusal")
        error = await fleet.the_error("a")
        assert type(error) is NoReplicaError
        assert "the request waited 0 s" in str(error)
        assert (fleet.orchestrator.metrics.requests_failed["no_replica"], fleet.orchestrator.metrics.held) == (1, 0)


async def test_the_queue_is_bounded() -> None:
    async with FakeFleet(replicas=1, replica_wait=LONG) as fleet:
        fleet.lose(0)
        for index in range(MAX_HELD_REQUESTS):
            await fleet.submit(f"r{index}")
        await fleet.submit("one too many")
        assert type(await fleet.the_error("one too many")) is NoReplicaError
        assert fleet.orchestrator.metrics.held == MAX_HELD_REQUESTS


async def test_a_request_only_submitted_for_its_abort_is_not_held() -> None:
    async with FakeFleet(replicas=1, replica_wait=LONG) as fleet:
        fleet.lose(0)
        await fleet.submit("a", abort_immediately=True)
        assert (fleet.orchestrator.metrics.held, fleet.orchestrator.request_states) == (0, {})


async def test_waiters_for_a_replica_are_notified() -> None:
    async with FakeFleet(replicas=1) as fleet:
        told: list[bool] = []
        tell = lambda: told.append(fleet.orchestrator.can_serve)  # noqa: E731
        fleet.orchestrator.serving_signal.notify = tell  # type: ignore[method-assign]
        member = fleet.pool.member(0)
        fleet.lose(0)
        fleet.join(member)
        fleet.pool.cordon(member, "admin")
        fleet.orchestrator.uncordon(member, "admin")
        assert told == [True, True]


async def outage(fleet: FakeFleet, requests: int) -> None:
    """All replicas are lost, and so many requests with the same beginning come."""
    for replica_id in range(len(fleet.pool.members)):
        fleet.lose(replica_id)
    for number in range(requests):
        await fleet.submit(f"r{number}", prompt=[*[7] * 64, number])


@pytest.mark.parametrize("balancer", [PrefixBalancer(), RoundRobinBalancer()])
async def test_a_replica_that_returns_gets_what_it_can_start_and_the_others_the_rest(balancer: LoadBalancer) -> None:
    size = EngineSize(step_tokens=1000, sequences=10)
    async with FakeFleet(replicas=4, balancer=balancer, replica_wait=LONG, size=size) as fleet:
        await outage(fleet, 30)
        for replica_id, expected in enumerate(([10, 0, 0, 0], [10, 10, 0, 0], [10, 10, 10, 0], [10, 10, 10, 0])):
            fleet.join(fleet.pool.member(replica_id))
            assert fleet.in_flight == expected


async def test_a_replica_that_returns_gets_no_more_than_its_kv_memory_holds() -> None:
    size = EngineSize(blocks=20, block_size=16, step_tokens=1000, sequences=100)
    async with FakeFleet(replicas=2, replica_wait=LONG, size=size) as fleet:
        await outage(fleet, 10)
        fleet.join(fleet.pool.member(0))
        assert fleet.in_flight == [5, 0]


async def test_requests_that_come_while_replicas_return_wait_behind_the_held_ones() -> None:
    async with FakeFleet(replicas=2, replica_wait=LONG, size=EngineSize(step_tokens=1000, sequences=2)) as fleet:
        await outage(fleet, 3)
        fleet.join(fleet.pool.member(0))
        # As the requests that `Hold` has kept do, all at once.
        await fleet.submit("new")
        assert (fleet.in_flight, fleet.orchestrator.metrics.held) == ([2, 0], 2)
        fleet.say("r0", 1, finish_reason="stop")
        await fleet.submit("newer")
        assert (fleet.home("r2"), fleet.home("new")) == (0, None)


async def test_what_no_other_replica_takes_goes_to_those_that_are_back() -> None:
    async with FakeFleet(replicas=2, replica_wait=LONG, size=EngineSize(step_tokens=1000, sequences=2)) as fleet:
        await outage(fleet, 5)
        fleet.join(fleet.pool.member(0))
        fleet.now += RETURN_INTERVAL_S
        await fleet.submit("new")
        await eventually(lambda: fleet.in_flight == [6, 0], "the end of the wait for the other replica")


async def test_a_request_whose_time_ends_while_replicas_return_is_sent() -> None:
    async with FakeFleet(replicas=2, replica_wait=SHORT, size=EngineSize(step_tokens=1000, sequences=1)) as fleet:
        await outage(fleet, 2)
        fleet.join(fleet.pool.member(0))
        fleet.now = SHORT
        await eventually(lambda: fleet.in_flight == [2, 0], "the end of the request's time")
        assert await fleet.read() == []


async def test_requests_that_waited_before_they_were_accepted_are_left_to_the_others_too() -> None:
    async with FakeFleet(replicas=2, replica_wait=LONG, size=EngineSize(step_tokens=1000, sequences=2)) as fleet:
        await outage(fleet, 0)
        fleet.orchestrator.metrics.held_before_accept = 4
        fleet.join(fleet.pool.member(0))
        for name in "abcd":
            await fleet.submit(name)
        assert fleet.in_flight == [2, 0]
        fleet.join(fleet.pool.member(1))
        assert fleet.in_flight == [2, 2]


async def test_without_an_outage_a_request_beyond_what_engines_start_at_once_is_sent() -> None:
    async with FakeFleet(replicas=1, replica_wait=LONG, size=EngineSize(step_tokens=1000, sequences=2)) as fleet:
        for name in "abc":
            await fleet.submit(name)
        assert fleet.in_flight == [3]
