"""Requests wait at the head, charged to no replica, until one can begin them."""

import asyncio

import msgspec
import pytest
import uvloop

from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.balancing import PrefixBalancer, Prompt, RoundRobinBalancer
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, SubmitRequest
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

from .late_fleet import LATE, got, late, submit_all

NAMES = "abcdef"


async def test_the_next_request_is_sent_at_the_first_output_of_one_and_not_before() -> None:
    async with late() as fleet:
        await submit_all(fleet, NAMES)
        link = fleet.links[0]
        assert got(link) == "ab"
        assert (fleet.in_flight, fleet.orchestrator.metrics.queued) == ([2], 4)
        fleet.say("a", 1)
        assert got(link) == "abc"
        fleet.say("a", 2, finish_reason="stop")
        assert got(link) == "abc"
        fleet.say("b", 1, finish_reason="stop")
        fleet.say("c", 1)
        assert got(link) == "abcde"
        assert fleet.orchestrator.metrics.idle_while_waiting == 0


async def test_an_engine_gets_prompts_for_two_steps_behind_the_one_that_it_computes() -> None:
    async with late(size=EngineSize(step_tokens=4, sequences=100)) as fleet:
        await submit_all(fleet, "abcdefgh")
        assert got(fleet.links[0]) == "abcde"


async def test_each_replica_gets_what_its_own_batches_hold() -> None:
    async with late(replicas=0, balancer=RoundRobinBalancer()) as fleet:
        for replica_id, sequences in enumerate((2, 40)):
            fleet.ready_response = msgspec.json.encode(EngineSize(step_tokens=1000, sequences=sequences))
            fleet.join(fleet.pool.add(replica_id)).report(running=0)
        for number in range(100):
            await fleet.submit(f"r{number}", prompt=[1, 2])
        assert [len(fleet.links[replica_id].added) for replica_id in (0, 1)] == [4, 43]


async def test_an_engine_without_free_kv_memory_gets_one_request_behind_another() -> None:
    async with late(size=EngineSize(100, 1, step_tokens=1000, sequences=1000)) as fleet:
        await fleet.submit("x")
        fleet.links[0].report(running=97)
        await submit_all(fleet, NAMES)
        assert got(fleet.links[0]) == "xa"


def test_a_request_with_a_deadline_can_follow_an_abort_on_the_loop_that_the_orchestrator_has() -> None:
    async def case() -> None:
        async with late() as fleet:
            await submit_all(fleet, "abc")
            abort, submit = (
                AbortRequests(("a",)),
                SubmitRequest(FakeRequest("d"), 0.0, terms=RequestTerms(timeout_s=60.0)),
            )
            await asyncio.gather(fleet.hand_over(abort), fleet.hand_over(submit))
            assert await fleet.read() == []

    # What is due at once is no timer to uvloop.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(case())


async def test_requests_that_wait_for_a_lost_replica_neither_move_nor_become_suspects() -> None:
    async with late(replicas=2, migration_limit=0) as fleet:
        fleet.pool.cordon(fleet.pool.member(1), ADMIN_CORDON)
        await submit_all(fleet, "abcd")
        fleet.orchestrator.uncordon(fleet.pool.member(1), ADMIN_CORDON)
        # One went to the replica that is there again, since it has room.
        fleet.lose(0)
        failed = {name for name, error in await fleet.read() if isinstance(error, Exception)}
        assert failed == {"a", "b"}
        assert set(got(fleet.links[1])) == {"c", "d"}
        assert not any(run.crash_losses for run in fleet.pool.member(1).in_flight.values())


async def test_requests_that_wait_while_the_only_replica_drains_are_held_for_the_next_one() -> None:
    async with late(replica_wait=600.0) as fleet:
        await submit_all(fleet, "abc")
        fleet.orchestrator.cordon(fleet.pool.member(0), ADMIN_CORDON)
        fleet.say("a", 1, finish_reason="stop")
        assert (got(fleet.links[0]), fleet.orchestrator.metrics.held) == ("ab", 1)
        fleet.join(fleet.pool.add())
        assert got(fleet.links[1]) == "c"


@pytest.mark.parametrize("end", ["refused", "aborted", "sent and aborted"])
async def test_a_prompt_that_no_engine_got_does_not_count_as_cached(end: str) -> None:
    prompt, plan = list(range(160)), AdmissionConfig(max_waiting_requests=1)
    async with FakeFleet(1, PrefixBalancer(), traits=LATE, plan=plan) as fleet:
        if end == "refused":
            await submit_all(fleet, "abc")
        elif end == "aborted":
            await submit_all(fleet, "ab")
        await fleet.submit("x", prompt=prompt)
        if end == "refused":
            assert isinstance(await fleet.the_error("x"), RequestRefusedError)
        else:
            await fleet.abort("x")
        _, decision = fleet.pool.decide({"prompt": Prompt(prompt)})
        assert bool(decision.matched_tokens) == (end == "sent and aborted")
