"""Requests that engines may have died of: the guilty one gets no third replica, and the others lose nothing by it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import DEAD_FRAME, FakeRequest
from tests.fakes.fleet import FakeFleet
from tests.orchestrator.test_local_replicas import Node
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError
from vllm_omni_plugin.orchestrator import suspects
from vllm_omni_plugin.orchestrator.messages import SubmitRequest
from vllm_omni_plugin.orchestrator.stage_pool import APART

LONG = 600.0


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=2, migration_limit=1, replica_wait=LONG) as fleet:
        yield fleet


def die(fleet: FakeFleet, replica_id: int) -> None:
    """An engine dies some time after all that was sent to it."""
    fleet.now += 1.0
    fleet.lose(replica_id)


def home(fleet: FakeFleet, request_id: str) -> int | None:
    """The replica that has a request."""
    return fleet.orchestrator.request_states[request_id].runs[0].replica_id


async def begin(fleet: FakeFleet, request_id: str, replica_id: int) -> None:
    """Submit a request to a replica and deliver the beginning of its answer."""
    await fleet.submit(request_id, affinity=replica_id)
    link, attempt = fleet.attempt(request_id)
    link.output(attempt, 5)


async def test_a_request_whose_engines_die_before_its_first_output_twice_gets_no_third() -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("p")
        first = home(fleet, "p")
        die(fleet, first or 0)
        second = home(fleet, "p")
        die(fleet, second or 0)
        [(_, error)] = await fleet.read()
        assert isinstance(error, RequestLostError)
        assert str(error).startswith(f"Replica {second} was lost while it served this request (the engine reported")
        assert f"as was replica {first} (the engine reported its own death) before it" in str(error)
        assert "no other replica gets it" in str(error)
        (third,) = fleet.pool.serving
        assert fleet.links[third.replica_id].added == []
        assert (fleet.orchestrator.metrics.queries_of_death, fleet.orchestrator.metrics.lost) == (1, 0)
        assert fleet.orchestrator.request_states == {}


async def test_suspects_are_tried_apart_in_order(fleet: FakeFleet) -> None:
    for name in "abc":
        await fleet.submit(name, affinity=0)
    die(fleet, 0)
    assert [home(fleet, name) for name in "abc"] == [1, None, None]
    assert fleet.orchestrator.metrics.moves_waiting == 2
    fleet.join(fleet.pool.member(0))
    assert [home(fleet, name) for name in "abc"] == [1, 0, None]
    assert fleet.orchestrator.metrics.decisions[0, "LeastQueueLengthBalancer", APART] == 1
    link, attempt = fleet.attempt("a")
    link.output(attempt, 5)
    assert [home(fleet, name) for name in "abc"] == [1, 0, 1]
    assert fleet.orchestrator.metrics.moves_waiting == 0


@pytest.mark.parametrize("name", ["begun", "new"])
async def test_the_moves_of_one_beside_a_guilty_request_do_not_count(fleet: FakeFleet, name: str) -> None:
    await begin(fleet, "begun", 0)
    await fleet.submit("p", affinity=0)
    await fleet.submit("new", affinity=0)
    for replica_id in (0, 1):
        die(fleet, replica_id)
        fleet.join(fleet.pool.member(replica_id))
    events = await fleet.read()
    assert isinstance(dict(events)["p"], RequestLostError)
    # It may still lose one replica for another reason.
    for left in (True, False):
        member = fleet.pool.member(home(fleet, name) or 0)
        fleet.orchestrator.replica_lost(member, "cut off")
        fleet.join(member)
        assert (name in fleet.orchestrator.request_states) is left
    assert "moved 1 times, the limit" in str(dict(await fleet.read())[name])


async def test_a_suspect_that_has_had_output_is_none_any_longer(fleet: FakeFleet) -> None:
    fleet.join(fleet.pool.add())
    await fleet.submit("a", affinity=0)
    die(fleet, 0)
    link, attempt = fleet.attempt("a")
    link.output(attempt, 5)
    fleet.orchestrator.replica_lost(fleet.pool.member(home(fleet, "a") or 0), "cut off")
    errors = dict(event for event in await fleet.read() if event[1] is not None)
    assert "moved 1 times" in str(errors["a"])
    assert fleet.orchestrator.metrics.queries_of_death == 0


async def test_a_new_request_beside_a_suspect_is_not_suspected(fleet: FakeFleet) -> None:
    await fleet.submit("p", affinity=0)
    die(fleet, 0)
    for name in "ab":
        await fleet.submit(name)
    die(fleet, 1)
    assert isinstance(dict(await fleet.read())["p"], RequestLostError)
    fleet.join(fleet.pool.member(0))
    assert [home(fleet, name) for name in "ab"] == [0, 0]


async def test_engines_that_die_together_say_nothing_of_a_request_that_came_from_one_to_the_other() -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("a", affinity=0)
        die(fleet, 0)
        fleet.lose(home(fleet, "a") or 0)
        assert await fleet.read() == []
        link, attempt = fleet.attempt("a")
        link.output(attempt, 5, finish_reason="stop")
        assert await fleet.read() == [("a", "stop")]


@pytest.mark.parametrize("reason", ["cut off", "it was removed"])
async def test_a_replica_that_is_lost_otherwise_makes_nobody_suspect(fleet: FakeFleet, reason: str) -> None:
    for name in "abc":
        await fleet.submit(name, affinity=0)
    fleet.now += 1.0
    fleet.orchestrator.replica_lost(fleet.pool.member(0), reason)
    assert [home(fleet, name) for name in "abc"] == [1, 1, 1]


async def test_the_ranks_of_a_lockstep_group_die_as_one_and_nobody_is_suspect(fleet: FakeFleet) -> None:
    fleet.pool.lockstep = True
    for name in "abc":
        await fleet.submit(name, affinity=0)
    die(fleet, 0)
    assert [home(fleet, name) for name in "abc"] == [1, 1, 1]


async def test_a_request_that_makes_engines_say_what_cannot_be_used_gets_no_third_either() -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("p")
        for _ in range(2):
            fleet.now += 1.0
            fleet.attempt("p")[0].say(b"garbage")
        [(_, error)] = await fleet.read()
        assert str(error).count("it sent a message that cannot be used") == 2
        assert "no other replica gets it" in str(error)
        assert len(fleet.pool.serving) == 1


async def test_a_request_that_has_had_output_is_no_suspect(fleet: FakeFleet) -> None:
    for name in "abc":
        await begin(fleet, name, 0)
    die(fleet, 0)
    assert [home(fleet, name) for name in "abc"] == [1, 1, 1]


async def test_suspects_wait_for_a_while_only_and_of_several_none_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "WAIT_S", 0.02)
    async with FakeFleet(replicas=3) as fleet:
        fleet.orchestrator.replica_lost(fleet.pool.member(2), "cut off")
        for name in "abc":
            await fleet.submit(name, affinity=0)
        die(fleet, 0)
        assert [home(fleet, name) for name in "abc"] == [1, None, None]
        fleet.now += 1.0
        await eventually(lambda: [home(fleet, name) for name in "abc"] == [1, 1, 1], "the end of the waiting")
        assert fleet.orchestrator.metrics.moves_waiting == 0
        for replica_id in (0, 2):
            fleet.join(fleet.pool.member(replica_id))
        await fleet.submit("new", affinity=1)
        die(fleet, 1)
        assert await fleet.read() == []
        assert home(fleet, "new") is not None
        # They are tried apart once more, and now there is one that it can have been.
        assert sorted([home(fleet, name) for name in "abc"], key=str) == [0, 2, None]
        die(fleet, home(fleet, "a") or 0)
        [(request_id, error)] = await fleet.read()
        assert (request_id, isinstance(error, RequestLostError)) == ("a", True)
        assert "no other replica gets it" in str(error)


async def test_a_suspect_that_is_aborted_makes_room_for_the_next(fleet: FakeFleet) -> None:
    for name in "abc":
        await fleet.submit(name, affinity=0)
    die(fleet, 0)
    await fleet.abort("b")
    assert fleet.orchestrator.metrics.moves_waiting == 1
    await fleet.abort("a")
    assert home(fleet, "c") == 1
    assert (fleet.orchestrator.metrics.moves_waiting, fleet.in_flight) == (0, [0, 1])


async def test_suspects_that_lose_the_last_replica_wait_as_all_do_and_are_refused_in_the_end() -> None:
    async with FakeFleet(replicas=2) as fleet:
        for name in "abc":
            await fleet.submit(name, affinity=0)
        die(fleet, 0)
        die(fleet, 1)
        errors = dict(await fleet.read())
        assert isinstance(errors["a"], RequestLostError)
        assert isinstance(errors["b"], NoReplicaError)
        assert isinstance(errors["c"], NoReplicaError)
        assert (fleet.orchestrator.request_states, fleet.orchestrator.metrics.moves_waiting) == ({}, 0)


async def test_suspects_that_were_held_are_tried_apart_too(fleet: FakeFleet) -> None:
    for name in "abc":
        await fleet.submit(name, affinity=0)
    fleet.orchestrator.replica_lost(fleet.pool.member(1), "cut off")
    die(fleet, 0)
    assert fleet.orchestrator.metrics.held == 3
    fleet.join(fleet.pool.member(0))
    assert [home(fleet, name) for name in "abc"] == [0, None, None]
    assert (fleet.orchestrator.metrics.held, fleet.orchestrator.metrics.moves_waiting) == (0, 2)


@pytest.mark.parametrize(
    ("ended", "suspects"),
    [
        ("it was ended by SIGSEGV", 2),
        ("it exited with code 1", 2),
        ("its worker VllmWorker-0 was ended by SIGILL", 2),
        ("it was ended by SIGKILL", 0),
        ("its worker VllmWorker-0 was ended by SIGKILL", 0),
        ("it was ended by SIGTERM", 0),
        ("it was ended by SIGINT", 0),
        pytest.param("it exited with code 0", 0, id="vLLM's way to end at SIGTERM"),
    ],
)
@pytest.mark.parametrize("reports", [True, False])
async def test_only_an_engine_that_crashed_by_itself_makes_what_it_had_suspect(
    tmp_path: Path, ended: str, suspects: int, reports: bool
) -> None:
    node = Node(tmp_path)
    running = asyncio.create_task(node.orchestrator.run())
    await node.replicas.start()
    for name in "ab":
        node.orchestrator.request_async_queue.force_put(SubmitRequest(FakeRequest(name, affinity=0), 0.0))
    await eventually(lambda: len(node.orchestrator.request_states) == 2)
    engine = node.engine_of(0)
    engine.process.last_words = ended
    if reports:
        engine.say(DEAD_FRAME)
    else:
        engine.process.die()
    runs = [state.runs[0] for state in node.orchestrator.request_states.values()]
    await eventually(lambda: all(run.losses for run in runs), "the loss")
    assert sum(len(run.suspicions) for run in runs) == suspects
    await node.replicas.close(0.0)
    node.orchestrator.close_queues()
    await running
    node.launcher.close()


async def test_no_request_is_lost_when_a_replica_is_killed_every_five_seconds() -> None:
    async with FakeFleet(replicas=2, replica_wait=LONG) as fleet:
        sent, kills, due, returns, computed = 0, 0, 5.0, dict[int, float](), {0: 0.0, 1: 0.0}
        while sent < 1000 or fleet.orchestrator.request_states:
            while sent < 1000 and len(fleet.orchestrator.request_states) < 16:
                await fleet.submit(f"r{sent}")
                sent += 1
            fleet.now += 0.1
            for replica_id in [replica_id for replica_id, at in returns.items() if at <= fleet.now]:
                del returns[replica_id]
                fleet.join(fleet.pool.member(replica_id))
            for member in fleet.pool.serving:
                # One request after the other, 0.4 s each.
                computed[member.replica_id] += 0.1 * bool(member.in_flight)
                if computed[member.replica_id] >= 0.4:
                    computed[member.replica_id] = 0.0
                    fleet.links[member.replica_id].output(next(iter(member.in_flight)), 5, finish_reason="stop")
            if fleet.now >= due:
                victim, kills, due = kills % 2, kills + 1, due + 5.0
                computed[victim], returns[victim] = 0.0, fleet.now + 2.0
                fleet.kill(victim)
            await fleet.read()
        assert kills > 30
        assert [event for event in fleet.events if event[1] != "stop"] == []
        assert len(fleet.events) == 1000
