"""What is made of Ray's answers, with a Ray that the test plays; `tests/engine/test_ray_nodes.py` has a real one."""

import sys
import time
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.ray.ray_nodes import AWAY_S, News, RayNodes


class PlayedRayError(Exception):
    """What Ray raises of an actor that is gone."""


class PlayedUnavailableError(PlayedRayError):
    """What Ray raises of an actor that it cannot reach, and perhaps can later."""


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
        if name in self.called[:-1]:
            self.calls[name] = Call()
        return self.calls[name]


class PlayedRay(ModuleType):
    """The part of Ray that is used."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=PlayedRayError, ActorUnavailableError=PlayedUnavailableError)
        self.options: dict[str, Any] = {}
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
        self.options = options
        return lambda of: SimpleNamespace(remote=self._start)

    def _start(self, arguments: list[str]) -> Actor:
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
    assert list(nodes.news(0.0)) == []
    ray.actors[1].calls["host"].answer = "here"
    assert list(nodes.news(0.0)) == [News(1, "here")]
    assert list(nodes.news(0.0)) == []
    ray.actors[1].calls["wait"].answer = 3
    assert list(nodes.news(0.0)) == [News(1, None, 3)]
    assert ray.killed == [ray.actors[1]]


def test_an_actor_that_is_gone_is_told_once_with_the_reason_in_one_line(ray: PlayedRay, nodes: RayNodes) -> None:
    error = PlayedRayError("The actor died.\n  Traceback\nits node has failed.\n\n")
    ray.actors[0].calls["host"].answer = ray.actors[0].calls["wait"].answer = error
    assert list(nodes.news(0.0)) == [News(0, None, "its node has failed.")]


def test_all_that_has_happened_is_told_at_once(ray: PlayedRay, nodes: RayNodes) -> None:
    for actor in ray.actors:
        actor.calls["host"].answer = "here"
    assert list(nodes.news(0.0)) == [News(0, "here"), News(1, "here")]


def test_a_place_that_is_told_after_the_end_is_no_news(ray: PlayedRay, nodes: RayNodes) -> None:
    ray.actors[0].calls["wait"].answer = 3
    assert list(nodes.news(0.0)) == [News(0, None, 3)]
    ray.actors[0].calls["host"].answer = "here"
    assert list(nodes.news(0.0)) == []


def test_an_actor_that_is_out_of_reach_for_a_while_is_asked_again(ray: PlayedRay, nodes: RayNodes) -> None:
    actor = ray.actors[0]
    for call in actor.calls.values():
        call.answer = PlayedUnavailableError("unavailable")
    assert list(nodes.news(0.0)) == []
    assert actor.called == ["host", "wait", "host", "wait"]
    actor.calls["host"].answer, actor.calls["wait"].answer = "here", 3
    assert list(nodes.news(0.0)) == [News(0, "here"), News(0, None, 3)]


def test_an_actor_that_stays_out_of_reach_is_lost_after_a_minute_but_not_for_two_short_times(
    ray: PlayedRay, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("vllm_omni_plugin.ray.ray_nodes.time.monotonic", lambda: now)

    def fail() -> list[News]:
        ray.actors[0].calls["wait"].answer = PlayedUnavailableError("unavailable")
        return list(nodes.news(0.0))

    assert fail() == []
    now += 2 * AWAY_S + 1
    assert fail() == []
    now += AWAY_S + 1
    assert fail() == [News(0, None, "unavailable")]
    assert ray.killed == [ray.actors[0]]


def test_an_answer_that_nobody_foresaw_costs_no_other_and_is_asked_for_again(ray: PlayedRay, nodes: RayNodes) -> None:
    ray.actors[0].calls["wait"].answer = 3
    ray.actors[1].calls["wait"].answer = LookupError()
    told = nodes.news(0.0)
    assert next(told) == News(0, None, 3)
    with pytest.raises(LookupError):
        next(told)
    ray.actors[1].calls["wait"].answer = 0
    assert list(nodes.news(0.0)) == [News(1, None, 0)]


def test_the_end_of_ray_under_the_command_is_an_error_that_says_what_to_do(ray: PlayedRay, nodes: RayNodes) -> None:
    ray.is_alive = False
    ray.actors[0].calls["host"].answer = PlayedRayError("its owner has died")
    with pytest.raises(OmniError, match=r"Ray on this machine has ended.*start Ray and this command again"):
        list(nodes.news(0.0))


def test_without_a_node_news_are_waited_for_all_the_same(ray: PlayedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("vllm_omni_plugin.ray.ray_nodes.time.sleep", slept.append)
    assert list(RayNodes("auto", ["MODEL"], gpus=0, cpus=1).news(2.0)) == []
    assert slept == [2.0]


def test_nodes_are_drained_and_killed_by_number_and_ray_is_left(ray: PlayedRay, nodes: RayNodes) -> None:
    with closing(nodes):
        nodes.drain(1)
        nodes.kill(0)
    assert ray.actors[1].called[-1] == "end"
    assert ray.killed == [ray.actors[0]]
    assert not ray.is_up
