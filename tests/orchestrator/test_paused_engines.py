"""Engines that an operator has paused: one later than another, or such that take no requests.

These go elsewhere, wait, or come back.
"""

import asyncio

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import REFUSED
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.pool import engine_refusals
from vllm_omni_plugin.orchestrator.pool.engine_refusals import RETRY_S
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON


def refuse(fleet: FakeFleet, request_id: str) -> None:
    fleet.say(request_id, finish_reason=REFUSED)


async def sent(fleet: FakeFleet, request_id: str) -> None:
    await eventually(lambda: fleet.home(request_id) is not None, "another attempt")


async def test_what_one_replica_refuses_another_one_answers() -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("a", prompt=[1])
        first = fleet.home("a")
        refuse(fleet, "a")
        await sent(fleet, "a")
        assert fleet.in_flight[first] == 0
        second = fleet.home("a")
        refuse(fleet, "a")
        await sent(fleet, "a")
        link, attempt = fleet.attempt("a")
        assert link not in (fleet.links[first], fleet.links[second])
        assert link.prompts[attempt] == [1]
        link.output(attempt, 5, finish_reason="stop")
        assert await fleet.read() == [("a", "stop")]
        assert fleet.tokens["a"] == [5]
        assert fleet.in_flight == [0, 0, 0]


async def test_a_client_gets_the_refusal_once_all_replicas_have_refused(fleet: FakeFleet) -> None:
    await fleet.submit("a")
    refuse(fleet, "a")
    await sent(fleet, "a")
    assert await fleet.read() == []
    refuse(fleet, "a")
    assert await fleet.read() == [("a", REFUSED)]
    assert not fleet.orchestrator.request_states
    assert fleet.in_flight == [0, 0]


async def test_requests_accepted_before_the_pause_go_on_after_it(fleet: FakeFleet) -> None:
    await fleet.submit("a", prompt=[1])
    fleet.say("a", 5)
    fleet.lose(fleet.home("a"))
    await sent(fleet, "a")
    for _ in range(3):
        refuse(fleet, "a")
        assert sum(fleet.in_flight) == 0
        fleet.now += RETRY_S
        await sent(fleet, "a")
    link, attempt = fleet.attempt("a")
    assert link.prompts[attempt] == [1, 5]
    link.output(attempt, 6, finish_reason="stop")
    await fleet.read()
    assert fleet.tokens["a"] == [5, 6]


async def test_a_replica_that_has_just_refused_one_request_is_not_asked_with_the_next() -> None:
    async with FakeFleet(replicas=4) as fleet:
        await fleet.submit("a")
        for _ in range(4):
            await sent(fleet, "a")
            refuse(fleet, "a")
        await fleet.submit("b")
        refuse(fleet, "b")
        assert await fleet.read() == [("a", REFUSED), ("b", REFUSED)]
        fleet.now += RETRY_S
        await fleet.submit("c")
        refuse(fleet, "c")
        await sent(fleet, "c")


async def test_one_waiting_request_at_a_time_is_sent_as_a_probe() -> None:
    async with FakeFleet(replicas=1, replica_wait=600.0) as fleet:
        for name in "abcd":
            await fleet.submit(name)
        fleet.kill(0)
        link = fleet.join(fleet.pool.member(0))
        for name in "abcd":
            await sent(fleet, name)
            refuse(fleet, name)
        assert (fleet.orchestrator.metrics.paused, fleet.in_flight, len(link.added)) == (4, [0], 4)
        fleet.now += RETRY_S
        await sent(fleet, "a")
        assert (fleet.orchestrator.metrics.paused, len(link.added)) == (3, 5)
        refuse(fleet, "a")
        fleet.now += RETRY_S
        await sent(fleet, "b")
        assert (fleet.orchestrator.metrics.paused, len(link.added)) == (3, 6)
        fleet.now += RETRY_S
        for name in "cda":
            await sent(fleet, name)
        assert (fleet.orchestrator.metrics.paused, fleet.in_flight) == (0, [4])


@pytest.fixture
def retry_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """A short `RETRY_S`, which sums up exactly."""
    monkeypatch.setattr(engine_refusals, "RETRY_S", 2.0**-6)
    return engine_refusals.RETRY_S


async def at_the_only_replica(fleet: FakeFleet, names: str) -> FakeLink:
    """Submit requests that have lost a replica, and so wait for the end of a pause."""
    for name in names:
        await fleet.submit(name)
    fleet.kill(0)
    link = fleet.join(fleet.pool.member(0))
    for name in names:
        await sent(fleet, name)
    return link


async def test_a_request_is_not_sent_back_to_the_replica_that_refused_it_however_long_ago_that_was(
    fleet: FakeFleet,
) -> None:
    await fleet.submit("a")
    refuse(fleet, "a")
    await sent(fleet, "a")
    fleet.now += RETRY_S
    refuse(fleet, "a")
    assert await fleet.read() == [("a", REFUSED)]


async def test_a_request_that_waited_for_the_end_of_a_pause_may_go_to_all_replicas_again(retry_s: float) -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("a")
        fleet.lose(fleet.home("a"))
        for _ in range(2):
            await sent(fleet, "a")
            refuse(fleet, "a")
        assert fleet.orchestrator.metrics.paused == 1
        fleet.now += retry_s
        await sent(fleet, "a")
        refuse(fleet, "a")
        assert fleet.orchestrator.metrics.paused == 0, "the other one may have been resumed"
        await sent(fleet, "a")


async def test_a_request_that_is_aborted_while_it_waits_for_the_end_of_a_pause_is_not_sent(retry_s: float) -> None:
    async with FakeFleet(replicas=1, replica_wait=600.0) as fleet:
        link = await at_the_only_replica(fleet, "abc")
        for name in "abc":
            refuse(fleet, name)
        await fleet.abort("a")
        assert fleet.orchestrator.metrics.paused == 2
        fleet.now += retry_s
        await sent(fleet, "b")
        assert (fleet.orchestrator.metrics.paused, len(link.added)) == (1, 4)


async def test_a_request_that_waits_for_the_end_of_a_pause_waits_for_a_replica_when_the_last_one_is_lost() -> None:
    async with FakeFleet(replicas=1, replica_wait=600.0) as fleet:
        await at_the_only_replica(fleet, "ab")
        for name in "ab":
            refuse(fleet, name)
        fleet.kill(0)
        assert (fleet.orchestrator.metrics.paused, fleet.orchestrator.metrics.held) == (0, 2)
        fleet.join(fleet.pool.member(0))
        for name in "ab":
            refuse(fleet, name)
        fleet.kill(0)
        fleet.now += 600.0
        fleet.orchestrator.tick()
        assert [(name, type(error)) for name, error in await fleet.read()] == [(name, NoReplicaError) for name in "ab"]


async def test_a_request_that_is_refused_after_the_last_replica_was_cordoned_waits_for_one_that_serves() -> None:
    async with FakeFleet(replicas=1, replica_wait=600.0) as fleet:
        await at_the_only_replica(fleet, "ab")
        refuse(fleet, "a")
        fleet.orchestrator.cordon(fleet.pool.member(0), ADMIN_CORDON)
        refuse(fleet, "b")
        await eventually(lambda: fleet.orchestrator.metrics.held == 2, "the wait for a replica")
        assert fleet.orchestrator.metrics.paused == 0
        fleet.now += 600.0
        fleet.orchestrator.tick()
        assert [(name, type(error)) for name, error in await fleet.read()] == [(name, NoReplicaError) for name in "ab"]


@pytest.mark.parametrize("then", ["it is answered", "it is aborted", "another one is aborted"])
async def test_all_go_on_once_the_one_that_was_tried_is_not_refused(then: str, retry_s: float) -> None:
    async with FakeFleet(replicas=1, replica_wait=600.0) as fleet:
        await at_the_only_replica(fleet, "abcd")
        for name in "abcd":
            refuse(fleet, name)
        fleet.now += retry_s
        await sent(fleet, "a")
        assert fleet.orchestrator.metrics.paused == 3
        if "aborted" in then:
            await fleet.abort("d" if "another" in then else "a")
            fleet.now += retry_s
        else:
            fleet.say("a", 1, finish_reason="stop")
        await sent(fleet, "b")
        assert fleet.orchestrator.metrics.paused == 0


async def test_a_request_that_fetches_a_cache_once_is_not_sent_again_after_a_refusal(fleet: FakeFleet) -> None:
    await fleet.submit("a", kv_transfer_params={"do_remote_prefill": True})
    refuse(fleet, "a")
    assert await fleet.read() == [("a", REFUSED)]
    assert sum(len(link.added) for link in fleet.links.values()) == 1


@pytest.mark.parametrize("waits", [True, False])
async def test_a_refused_request_that_is_aborted_is_forgotten(fleet: FakeFleet, waits: bool) -> None:
    await fleet.submit("a")
    if waits:
        fleet.lose(fleet.home("a"))
        await sent(fleet, "a")
    refuse(fleet, "a")
    await fleet.abort("a")
    added = [len(link.added) for link in fleet.links.values()]
    fleet.now += 2 * RETRY_S
    await fleet.submit("b")
    assert sum(len(link.added) for link in fleet.links.values()) == sum(added) + 1
    assert await fleet.read() == []


@pytest.mark.parametrize("reason", [REFUSED, "abort", "error"])
async def test_a_session_whose_parts_are_on_their_way_is_not_sent_elsewhere_and_ended_where_they_go(
    fleet: FakeFleet,
    reason: str,
) -> None:
    await fleet.submit("a", resumable=True)
    await fleet.submit("a", resumable=True)
    link, attempt = fleet.attempt("a")
    link.output(attempt, finish_reason=reason)
    assert await fleet.read() == [("a", reason)]
    assert link.aborted == [attempt]
    assert fleet.in_flight == [0, 0]


async def test_a_bound_request_is_not_sent_elsewhere(fleet: FakeFleet) -> None:
    await fleet.submit("a", affinity=1)
    refuse(fleet, "a")
    assert await fleet.read() == [("a", REFUSED)]


def answer(fleet: FakeFleet, replica_id: int) -> None:
    """A replica answers the call that it got last."""
    call_id, method, _ = fleet.links[replica_id].calls[-1]
    fleet.links[replica_id].answer(call_id, method)


async def begin(fleet: FakeFleet, method: str, *args: object) -> "asyncio.Future[list[object]]":
    """Call both replicas, which have not answered yet."""
    calling = asyncio.wrap_future(fleet.ask(method, *args))
    called = [(method, list(args))] * len(fleet.links)
    await eventually(lambda: [link.calls[-1][1:] for link in fleet.links.values() if link.calls] == called, "the call")
    return calling


async def test_streams_end_whole_when_one_replica_is_paused_and_resumed_later_than_the_other(fleet: FakeFleet) -> None:
    for name, replica_id in (("a", 0), ("b", 1)):
        await fleet.submit(name, affinity=replica_id)
        fleet.say(name, 1)
    pausing = await begin(fleet, "pause_scheduler", "keep", False)
    answer(fleet, 0)
    # The other one goes on meanwhile.
    fleet.say("b", 2)
    await fleet.submit("c", affinity=1)
    fleet.say("c", 7)
    assert not pausing.done()
    answer(fleet, 1)
    assert await pausing == ["pause_scheduler"] * 2
    await fleet.submit("d", affinity=0)
    resuming = await begin(fleet, "resume_scheduler")
    answer(fleet, 1)
    fleet.say("b", 3, finish_reason="stop")
    fleet.say("c", 8, finish_reason="stop")
    answer(fleet, 0)
    await resuming
    fleet.say("a", 2, finish_reason="stop")
    fleet.say("d", 5, finish_reason="stop")
    ends = [event for event in await fleet.read() if event[1] is not None]
    assert ends == [("b", "stop"), ("c", "stop"), ("a", "stop"), ("d", "stop")]
    assert fleet.tokens == {"a": [1, 2], "b": [1, 2, 3], "c": [7, 8], "d": [5]}
    assert fleet.in_flight == [0, 0]


async def test_a_stream_whose_replica_is_lost_before_it_is_paused_goes_on_at_the_paused_one_when_that_is_resumed(
    fleet: FakeFleet,
) -> None:
    await fleet.submit("a", affinity=1, prompt=[9])
    fleet.say("a", 1)
    pausing = await begin(fleet, "pause_scheduler", "keep", False)
    answer(fleet, 0)
    fleet.lose(1)
    assert await pausing == ["pause_scheduler"]
    link, attempt = fleet.attempt("a")
    assert link is fleet.links.pop(0)
    assert link.prompts[attempt] == [9, 1]
    assert await fleet.replayed() == [("pause_scheduler", ["keep", False])]
    resuming = asyncio.wrap_future(fleet.ask("resume_scheduler"))
    await eventually(lambda: link.calls[-1][1] == "resume_scheduler", "the call")
    link.answer(link.calls[-1][0], None)
    await resuming
    link.output(attempt, 2, finish_reason="stop")
    await fleet.read()
    assert fleet.tokens["a"] == [1, 2]
    assert await fleet.replayed() == []
