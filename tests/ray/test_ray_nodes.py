"""`RayNodes` with a fake Ray; `tests/engine/test_ray_nodes.py` has a real one."""

import sys
import time
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.ray.node_process import ReplicaMachines
from vllm_omni_plugin.ray.ray_nodes import AWAY_S, NodeEvent, NodeKind, RayNodes


class FakeRayError(Exception):
    """For a dead actor."""


class FakeUnavailableError(FakeRayError):
    """For an actor that is unreachable for now."""


class Call:
    """One call to an actor. The test sets its answer."""

    def __init__(self) -> None:
        self.answer: Any = None


class Actor:
    """An actor whose calls the test answers."""

    def __init__(self) -> None:
        self.calls = {name: Call() for name in ("host", "wait", "end", "meeting_address")}
        self.called: list[str] = []
        for name in self.calls:
            setattr(self, name, SimpleNamespace(remote=lambda name=name: self._call(name)))

    def _call(self, name: str) -> Call:
        self.called.append(name)
        if name in self.called[:-1]:
            self.calls[name] = Call()
        return self.calls[name]


class FakeRay(ModuleType):
    """The part of Ray that is used."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=FakeRayError, ActorUnavailableError=FakeUnavailableError)
        self.options: list[dict[str, Any]] = []
        self.started: list[tuple[Any, ...]] = []
        # Of placement groups, the bundles; None once one is removed.
        self.placed: list[Any] = []
        self.util = SimpleNamespace(
            placement_group=self._place,
            remove_placement_group=lambda number: self.placed.__setitem__(number, None),
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=SimpleNamespace),
        )
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.is_up = False
        self.is_alive = True

    def init(self, address: str) -> None:
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "there", "Alive": True}, {"NodeID": "here", "Alive": self.is_alive}]

    def remote(self, **options: Any) -> Any:
        kind = len(self.options)
        self.options.append(options)
        return lambda of: SimpleNamespace(
            remote=lambda *given: self._start(kind, *given),
            options=lambda scheduling_strategy: SimpleNamespace(
                remote=lambda *given: self._start(scheduling_strategy.placement_group_bundle_index, *given)
            ),
        )

    def _place(self, bundles: list[dict[str, int]], strategy: str) -> int:
        self.placed.append((bundles, strategy))
        return len(self.placed) - 1

    def _start(self, kind: int, *given: Any) -> Actor:
        self.started.append((kind, *given))
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, calls: list[Call], timeout: float, num_returns: int = 1) -> tuple[list[Call], list[Call]]:
        assert 0 < num_returns <= len(calls)
        done = [call for call in calls if call.answer is not None][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, call: Call) -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.fixture
def nodes(ray: FakeRay) -> RayNodes:
    """Nodes 0 and 1, requested."""
    nodes = RayNodes("auto", [NodeKind(["MODEL"], gpus=4, cpus=8), NodeKind(["OTHER"], gpus=1, cpus=2)])
    nodes.start(0)
    nodes.start(1)
    return nodes


def test_an_actor_has_what_a_node_needs(ray: FakeRay, nodes: RayNodes) -> None:
    nodes.start(2, kind=1)
    assert [(each["num_gpus"], each["num_cpus"]) for each in ray.options] == [(4, 8), (1, 2)]
    assert ray.started == [(0, ["MODEL"]), (0, ["MODEL"]), (1, ["OTHER"])]
    # `end` must run while `wait` blocks.
    assert all(each["max_concurrency"] > 1 for each in ray.options)


def test_each_answer_is_one_event(ray: FakeRay, nodes: RayNodes) -> None:
    assert list(nodes.events(0.0)) == []
    ray.actors[1].calls["host"].answer = "here"
    assert list(nodes.events(0.0)) == [NodeEvent(1, "here")]
    assert list(nodes.events(0.0)) == []
    ray.actors[1].calls["wait"].answer = 3
    assert list(nodes.events(0.0)) == [NodeEvent(1, None, 3)]
    assert ray.killed == [ray.actors[1]]


def test_a_dead_actor_is_one_event_with_a_reason_in_one_line(ray: FakeRay, nodes: RayNodes) -> None:
    error = FakeRayError("The actor died.\n  Traceback\nits node has failed.\n\n")
    ray.actors[0].calls["host"].answer = ray.actors[0].calls["wait"].answer = error
    assert list(nodes.events(0.0)) == [NodeEvent(0, None, "its node has failed.")]


def test_a_call_to_an_unreachable_actor_is_repeated(ray: FakeRay, nodes: RayNodes) -> None:
    actor = ray.actors[0]
    for call in actor.calls.values():
        call.answer = FakeUnavailableError("unavailable")
    assert list(nodes.events(0.0)) == []
    assert actor.called == ["host", "wait", "host", "wait"]
    actor.calls["host"].answer, actor.calls["wait"].answer = "here", 3
    assert list(nodes.events(0.0)) == [NodeEvent(0, "here"), NodeEvent(0, None, 3)]


def test_an_actor_is_lost_after_a_minute_without_contact_but_not_for_two_short_times(
    ray: FakeRay, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("vllm_omni_plugin.ray.ray_nodes.time.monotonic", lambda: now)

    def fail() -> list[NodeEvent]:
        ray.actors[0].calls["wait"].answer = FakeUnavailableError("unavailable")
        return list(nodes.events(0.0))

    assert fail() == []
    now += 2 * AWAY_S + 1
    assert fail() == []
    now += AWAY_S + 1
    assert fail() == [NodeEvent(0, None, "unavailable")]
    assert ray.killed == [ray.actors[0]]


def test_an_unexpected_error_loses_no_other_event_and_is_retried(ray: FakeRay, nodes: RayNodes) -> None:
    ray.actors[0].calls["wait"].answer = 3
    ray.actors[1].calls["wait"].answer = LookupError()
    events = nodes.events(0.0)
    assert next(events) == NodeEvent(0, None, 3)
    with pytest.raises(LookupError):
        next(events)
    ray.actors[1].calls["wait"].answer = 0
    assert list(nodes.events(0.0)) == [NodeEvent(1, None, 0)]


def test_the_end_of_ray_is_an_error_that_says_what_to_do(ray: FakeRay, nodes: RayNodes) -> None:
    ray.is_alive = False
    ray.actors[0].calls["host"].answer = FakeRayError("its owner has died")
    with pytest.raises(OmniError, match=r"Ray on this machine has ended.*start Ray and this command again"):
        list(nodes.events(0.0))


def test_nodes_are_drained_and_killed_by_number_and_close_leaves_ray(ray: FakeRay, nodes: RayNodes) -> None:
    with closing(nodes):
        nodes.drain(1)
        nodes.kill(0)
    assert ray.actors[1].called[-1] == "end"
    assert ray.killed == [ray.actors[0]]
    assert not ray.is_up


MACHINES = ReplicaMachines(3, ("10.0.0.1", 7500))


@pytest.fixture
def replica(ray: FakeRay) -> RayNodes:
    """Node 0, a replica over three machines."""
    nodes = RayNodes("auto", [NodeKind(["MODEL"], gpus=8, cpus=0, group=MACHINES)])
    nodes.start(0)
    return nodes


def test_the_machines_of_a_replica_are_reserved_together_and_meet_at_the_first(ray: FakeRay, replica: RayNodes) -> None:
    assert ray.placed == [([{"GPU": 8}] * 3, "STRICT_SPREAD")]
    where = ray.actors[0].calls["meeting_address"]
    assert ray.started == [(rank, ["MODEL"], MACHINES, rank, where if rank else None) for rank in range(3)]
    ray.actors[0].calls["host"].answer = "first"
    assert list(replica.events(0.0)) == [NodeEvent(0, "first")]


def test_a_replica_ends_with_any_of_its_machines_and_frees_all(ray: FakeRay, replica: RayNodes) -> None:
    ray.actors[2].calls["wait"].answer = FakeRayError("its node has failed.")
    assert list(replica.events(0.0)) == [NodeEvent(0, None, "its node has failed.")]
    assert (ray.killed, ray.placed) == (ray.actors, [None])
    for actor in ray.actors[:2]:
        actor.calls["wait"].answer = FakeRayError("it was killed")
    assert list(replica.events(0.0)) == [], "they are no further nodes"


def test_a_drain_is_of_all_machines_of_a_replica(ray: FakeRay, replica: RayNodes) -> None:
    replica.drain(0)
    assert [actor.called[-1] for actor in ray.actors] == ["end"] * 3


def test_a_replica_that_drains_ends_with_its_last_machine(ray: FakeRay, replica: RayNodes) -> None:
    replica.drain(0)
    first, *others = ray.actors
    for actor, end in zip(others, (0, FakeRayError("its node has failed.")), strict=True):
        actor.calls["wait"].answer = end
        assert list(replica.events(0.0)) == []
    # The first machine still finishes its requests.
    assert (first in ray.killed, ray.placed) == (False, [([{"GPU": 8}] * 3, "STRICT_SPREAD")])
    first.calls["wait"].answer = 0
    assert list(replica.events(0.0)) == [NodeEvent(0, None, 0)]
    assert (first in ray.killed, ray.placed) == (True, [None])


def test_a_replica_that_drains_and_is_killed_is_gone_at_once(ray: FakeRay, replica: RayNodes) -> None:
    replica.drain(0)
    replica.kill(0)
    ray.actors[2].calls["wait"].answer = FakeRayError("it was killed")
    assert list(replica.events(0.0)) == [NodeEvent(0, None, "it was killed")]
