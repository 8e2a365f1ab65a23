"""A request that waits at the head keeps its place when it cannot go to its replica."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import DISAGGREGATED
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.errors import MessageTooLargeError, RequestLostError
from vllm_omni_plugin.orchestrator.dispatch import move_budget
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON

from .late_fleet import LATE, got, late, submit_all

LONG = 600.0


def drain(fleet: FakeFleet) -> None:
    fleet.orchestrator.cordon(fleet.pool.member(0), ADMIN_CORDON)


def lose(fleet: FakeFleet) -> None:
    fleet.kill(0)


def break_link(fleet: FakeFleet) -> None:
    """The next one that is sent finds the replica dead."""
    fleet.links[0].broken = True
    fleet.say("a", 1)


@pytest.mark.parametrize("happens", [drain, lose, break_link])
async def test_a_request_that_has_waited_is_not_judged_again_when_it_waits_for_another_replica(
    happens: Callable[[FakeFleet], None],
) -> None:
    async with late(replicas=2, plan=AdmissionConfig(max_waiting_requests=4)) as fleet:
        # Two at each, and four that wait.
        await submit_all(fleet, "abcdefgh")
        assert (fleet.in_flight, fleet.orchestrator.metrics.queued) == ([2, 2], 4)
        fleet.orchestrator.admission.replace(AdmissionConfig(max_waiting_requests=1))
        happens(fleet)
        assert await fleet.read() in ([], [("a", None)])
        for member in fleet.pool.serving:
            for attempt in [*member.in_flight]:
                fleet.links[member.replica_id].output(attempt, 1)
        assert len(fleet.orchestrator.request_states) == 8


async def test_a_request_that_waits_after_its_replica_was_found_dead_counts_as_waiting() -> None:
    async with late(replica_wait=LONG, plan=AdmissionConfig(max_waiting_requests=1)) as fleet:
        await submit_all(fleet, "abc")
        lose(fleet)
        assert fleet.orchestrator.admission.backlog.requests == 1
        fleet.join(fleet.pool.member(0))
        fleet.say("a", 1)
        assert got(fleet.links[0]) == "abc"
        assert fleet.orchestrator.admission.backlog.requests == 0


async def test_an_unsent_request_of_a_lost_replica_goes_on_without_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_budget, "MOVES_AT_ONCE", 0)
    async with late(replica_wait=LONG) as fleet:
        await submit_all(fleet, "ab")
        # No session of a client could move.
        await fleet.submit("s", prompt=[1], resumable=True)
        await fleet.submit("s", prompt=[2], resumable=True)
        lose(fleet)
        metrics, states = fleet.orchestrator.metrics, fleet.orchestrator.request_states
        assert (list(states), metrics.moves_waiting, metrics.held) == (["a", "b", "s"], 2, 1)
        fleet.join(fleet.pool.member(0))
        assert (got(fleet.links[0]), states["s"].runs[0].attempts) == ("ss", 1)
        assert sum(metrics.request_moves.values()) == 2
        told = [(event.kind.value, event.requests) for event in fleet.orchestrator.events.after()]
        assert told == [("lost", 2), ("move", 2)]


async def test_a_chain_of_many_dead_replicas_costs_a_session_nothing() -> None:
    async with FakeFleet(replicas=300, replica_wait=LONG, migration_limit=0) as fleet:
        for link in fleet.links.values():
            link.broken = True
        await fleet.submit("s", prompt=[1], resumable=True)
        run = fleet.orchestrator.request_states["s"].runs[0]
        await eventually(lambda: not fleet.pool.serving, "the losses")
        assert (run.attempts, run.first_sent_at, run.losses, fleet.pool.serving[:]) == (0, None, [], ())
        fleet.now = 5.0
        fleet.join(fleet.pool.member(0))
        assert (run.attempts, run.first_sent_at, got(fleet.links[0])) == (1, 5.0, "s")


async def test_the_first_request_is_sent_after_a_replica_that_was_dead() -> None:
    async with FakePipelineFleet(DISAGGREGATED, replica_wait=LONG) as fleet:
        fleet.links[1, 0].broken = True
        await fleet.submit("r")
        fleet.tell("r", 0, 9, finish_reason="length", kv_transfer_params={"remote": "here"}, cached=2)
        await fleet.settle()
        await eventually(lambda: not fleet.pools[1].serving, "the loss")
        link = fleet.join(fleet.pools[1].member(0))
        assert link.requests[0]["sampling_params"]["kv"] == {"remote": "here"}
        fleet.tell("r", 1, 5, cached=3)
        await fleet.read()
        assert fleet.cached["r"] == [2]


async def test_the_first_request_is_sent_to_a_replica_that_has_room_earlier() -> None:
    async with FakePipelineFleet(DISAGGREGATED, traits=LATE) as fleet:
        for name in "abc":
            await fleet.submit(name)
            fleet.tell(name, 0, 9, finish_reason="length", kv_transfer_params={"of": name}, cached=2)
            await fleet.settle()
        assert len(fleet.links[1, 0].requests) == 2
        link = fleet.join(fleet.pools[1].add())
        assert [request["sampling_params"]["kv"] for request in link.requests] == [{"of": "c"}]


async def test_an_output_of_a_replica_that_is_found_dead_when_it_has_room_comes_before_the_error() -> None:
    async with late(migration_limit=0) as fleet:
        await submit_all(fleet, "abc")
        break_link(fleet)
        await eventually(lambda: not fleet.pool.serving, "the loss")
        said, error = [outcome for name, outcome in await fleet.read() if name == "a"]
        assert said is None
        assert isinstance(error, RequestLostError)


async def test_nothing_of_a_session_is_sent_if_its_first_message_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with late() as fleet:
        await submit_all(fleet, "ab")
        await fleet.submit("s", prompt=[1], resumable=True)
        await fleet.submit("s", prompt=[2], resumable=True)
        link, frames = fleet.links[0], list[Any]()

        def send(message: Any) -> None:
            frames.append(message)
            if len(frames) == 1:
                raise MessageTooLargeError("it is too large")

        monkeypatch.setattr(link, "send", send)
        fleet.say("a", 1)
        assert len(frames) == 1
        assert [name for name, _ in await fleet.read()] == ["a", "s"]
