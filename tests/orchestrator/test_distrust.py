"""What is wrong with one request or message ends that one alone; two unusable outputs take their replica out."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi, FakeOutput, FakeOutputs
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink
from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from tests.orchestrator.local_node import running_node
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, OutputUnusable
from vllm_omni_plugin.orchestrator.single_stage import SingleStageRequests


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


def fail_for(monkeypatch: pytest.MonkeyPatch, method: str, request_id: str) -> None:
    unharmed = getattr(FakeEngineApi, method)

    def faulty(api: FakeEngineApi, subject: Any, *args: Any) -> Any:
        if subject.request_id == request_id:
            raise KeyError(method)
        return unharmed(api, subject, *args)

    monkeypatch.setattr(FakeEngineApi, method, faulty)


def say(link: FakeLink, *outputs: FakeOutput) -> None:
    link.say(msgspec.json.encode(FakeOutputs(outputs=list(outputs))))


@pytest.mark.parametrize(
    "method",
    ["make_movable", "describe", "cached_tokens", "how_to_move", "end_if_complete", "continuation", "trim_repeated"],
)
async def test_an_api_that_fails_for_one_request_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with FakeFleet(replicas=1, replica_wait=600.0) as fleet:
        fail_for(monkeypatch, method, "bad")
        for name in ("bad", "good"):
            await fleet.submit(name, prompt=[1], move="replay")
        link = fleet.links[0]
        say(link, *(FakeOutput(attempt, [5], first=True) for attempt in link.added))
        fleet.lose(0)
        link = fleet.join(fleet.pool.member(0))
        say(link, *(FakeOutput(attempt, [5, 6], "stop") for attempt in link.added))
        await fleet.read()
        ends = dict(event for event in fleet.events if event[1] is not None)
        assert isinstance(ends["bad"], OmniError)
        assert method in str(ends["bad"])
        assert (ends["good"], fleet.tokens["good"]) == ("stop", [5, 6])
        assert (fleet.in_flight, fleet.orchestrator.request_states, fleet.orchestrator.metrics.held) == ([0], {}, 0)
        await fleet.submit("next")
        assert fleet.in_flight == [1]


async def test_a_request_that_cannot_be_read_is_aborted_at_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeFleet(replicas=1) as fleet:
        fail_for(monkeypatch, "cached_tokens", "bad")
        await fleet.submit("bad")
        link, attempt = fleet.attempt("bad")
        link.output(attempt, 5)
        assert link.aborted == [attempt]


async def test_a_request_whose_failure_cannot_be_reported_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("nobody listens")

    async with FakeFleet(replicas=1) as fleet:
        fail_for(monkeypatch, "make_movable", "bad")
        monkeypatch.setattr(SingleStageRequests, "fail", fail)
        await fleet.submit("bad")
        await fleet.submit("good")
        assert list(fleet.orchestrator.request_states) == ["good"]


async def test_an_abort_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise KeyError("gone")

    async with FakeFleet() as fleet:
        await fleet.submit("a")
        with monkeypatch.context() as patch:
            patch.setattr(SingleStageRequests, "abort", faulty)
            await fleet.abort("a")
        await fleet.submit("b")
        assert fleet.in_flight == [1, 1]


async def test_a_pipelines_request_that_cannot_be_begun_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.apis[-1].faults["check_answerable"] = KeyError("gone")
        await fleet.submit("bad", "text")
        [error] = fleet.call_ends("bad")
        assert isinstance(error, OmniError)
        assert "gone" in str(error)
        assert (fleet.ends, fleet.states) == ([("bad", error)], {})
        fleet.apis[-1].faults.clear()
        await fleet.submit("good", "text")
        await fleet.finish()
        assert fleet.call_ends("good") == [None]


async def test_an_action_that_fails_halfway_is_answered() -> None:
    async def delayed(*_: object) -> None:
        raise KeyError("gone")

    async with FakeFleet() as fleet:
        fleet.pool.member(0).remote = True
        fleet.fleet_calls.manage = delayed  # type: ignore[method-assign]
        with pytest.raises(KeyError, match="gone"):
            await fleet.manage("drain", 0)


async def test_a_replica_whose_engine_cannot_be_ended_in_order_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(timeout: float | None = None) -> None:
        raise OSError("no such process")

    async with running_node() as node:
        await node.replicas.start()
        process = node.engine_of(0).process
        monkeypatch.setattr(process, "shutdown", fail)
        process.die()
        node.go_on.release()
        await node.until_back(0, restarts=1)
