"""What is made of Ray's answers, with a Ray that the test plays; `tests/engine/test_ray_nodes.py` has a real one."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.ray.ray_nodes import Ended, Placed, RayNodes


class PlayedRayError(Exception):
    """What Ray raises of an actor that is gone."""


class Call:
    """One call to an actor. The test sets its answer."""

    def __init__(self) -> None:
        self.answer: Any = None


class Actor:
    """An actor whose calls the test answers."""

    def __init__(self) -> None:
        self.calls = {name: Call() for name in ("host", "wait", "end")}
        self.called: list[str] = []
        for name in self.calls:
            setattr(self, name, SimpleNamespace(remote=lambda name=name: self._call(name)))

    def _call(self, name: str) -> Call:
        self.called.append(name)
        return self.calls[name]


class PlayedRay(ModuleType):
    """The part of Ray that is used."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=PlayedRayError)
        self.options: dict[str, Any] = {}
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.is_up = False

    def init(self, address: str) -> None:
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda of: SimpleNamespace(remote=self._start)

    def _start(self, arguments: list[str]) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.answer is not None]
        return done, [call for call in calls if call.answer is None]

    def get(self, call: Call) -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    ray = PlayedRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.fixture
def nodes(ray: PlayedRay) -> RayNodes:
    """Nodes 0 and 1, asked for."""
    nodes = RayNodes("auto", ["MODEL"], gpus=4, cpus=8)
    nodes.start(0)
    nodes.start(1)
    return nodes


def test_an_actor_has_what_a_node_needs(ray: PlayedRay, nodes: RayNodes) -> None:
    assert (ray.options["num_gpus"], ray.options["num_cpus"]) == (4, 8)
    # Else nobody could tell a node to end while its end is waited for.
    assert ray.options["max_concurrency"] > 1


def test_what_actors_answer_is_told_once(ray: PlayedRay, nodes: RayNodes) -> None:
    assert nodes.news(0.0) == []
    ray.actors[1].calls["host"].answer = "here"
    assert nodes.news(0.0) == [Placed(1, "here")]
    assert nodes.news(0.0) == []
    ray.actors[1].calls["wait"].answer = 3
    assert nodes.news(0.0) == [Ended(1, 3)]
    assert ray.killed == [ray.actors[1]]


def test_an_actor_that_is_gone_is_told_once_with_the_reason_in_one_line(ray: PlayedRay, nodes: RayNodes) -> None:
    error = PlayedRayError("The actor died.\n  Traceback\nits node has failed.\n\n")
    ray.actors[0].calls["host"].answer = ray.actors[0].calls["wait"].answer = error
    assert nodes.news(0.0) == [Ended(0, "its node has failed.")]


def test_without_a_node_news_are_waited_for_all_the_same(ray: PlayedRay) -> None:
    assert RayNodes("auto", ["MODEL"], gpus=0, cpus=1).news(0.01) == []


def test_nodes_are_drained_and_killed_by_number_and_ray_is_left(ray: PlayedRay, nodes: RayNodes) -> None:
    with nodes:
        nodes.drain(1)
        nodes.kill(0)
    assert ray.actors[1].called[-1] == "end"
    assert ray.killed == [ray.actors[0]]
    assert not ray.is_up
