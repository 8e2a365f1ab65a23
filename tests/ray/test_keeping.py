"""The loop that keeps nodes, over nodes that the test plays, one step of the clock for each look."""

import pytest

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.ray.keeping import TICK_S, Keeping
from vllm_omni_plugin.ray.node_set import NodeSet
from vllm_omni_plugin.ray.ray_nodes import News

SIGNAL = "a signal"
Plan = dict[float, list[News | str | Exception]]


class PlayedNodes:
    """Notes what is done to nodes, and makes happen what is planned for the time that has passed.

    Args:
        plan: news, signals and errors of each wait, by the second in which it ends.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.now = 0.0
        self.done: list[str] = []
        self.waiting: list[News] = []
        self.said: list[str] = []
        self.keeping = Keeping(self, NodeSet(10.0), lambda now: 2, lambda: self.now, self.said.append)

    def start(self, number: int) -> None:
        self.done.append(f"start {number}")
        self.waiting.append(News(number, f"host{number}"))

    def drain(self, number: int) -> None:
        self.done.append(f"drain {number}")

    def kill(self, number: int) -> None:
        self.done.append(f"kill {number}")
        self.waiting.append(News(number, None, "killed"))

    def news(self, timeout: float) -> list[News]:
        assert self.now < 1000.0, self.said
        self.now += timeout
        for event in self._plan.get(self.now, []):
            if isinstance(event, News):
                self.waiting.append(event)
            elif isinstance(event, Exception):
                raise event
            else:
                self.keeping.signals += 1
        news, self.waiting = self.waiting, []
        return news


def test_a_lost_node_is_replaced_and_a_signal_drains_all() -> None:
    lost = News(0, None, "its machine died")
    nodes = PlayedNodes({100: [lost], 200: [SIGNAL], 204: [News(1, None, 0), News(2, None, 0)]})
    assert nodes.keeping.run() is True
    assert nodes.done == ["start 0", "start 1", "start 2", "drain 2", "drain 1"]
    assert "node 0: lost, its machine died" in nodes.said
    assert "node 2: runs on host2" in nodes.said
    assert "node 1: ended with code 0" in nodes.said


def test_a_second_signal_is_passed_on_to_the_nodes() -> None:
    nodes = PlayedNodes({100: [SIGNAL], 104: [SIGNAL], 108: [News(0, None, 0), News(1, None, 0)]})
    assert nodes.keeping.run() is True
    assert nodes.done[2:] == ["drain 1", "drain 0", "drain 0", "drain 1"]


def test_nodes_that_do_not_drain_are_killed() -> None:
    nodes = PlayedNodes({100: [SIGNAL]})
    assert nodes.keeping.run() is True
    assert nodes.done[2:] == ["drain 1", "drain 0", "kill 0", "kill 1"]
    assert nodes.now <= 100 + 10 + 30 + 3 * TICK_S


def test_a_refused_command_line_ends_all_and_is_not_tried_again() -> None:
    nodes = PlayedNodes({4: [News(0, None, 2)], 8: [News(1, None, 2)]})
    assert nodes.keeping.run() is False
    assert nodes.done == ["start 0", "start 1", "drain 1"]
    assert sum("command line" in line for line in nodes.said) == 1


def test_a_node_that_is_refused_after_others_have_settled_is_replaced() -> None:
    ends = [SIGNAL, News(1, None, 0), News(3, None, 0)]
    nodes = PlayedNodes({100: [News(0, None, -9)], 104: [News(2, None, 2)], 200: ends})
    assert nodes.keeping.run() is True
    assert nodes.done == ["start 0", "start 1", "start 2", "start 3"]


def test_the_first_signal_after_a_refusal_is_passed_on_to_the_nodes() -> None:
    nodes = PlayedNodes({4: [News(0, None, 2)], 8: [SIGNAL], 12: [News(1, None, 0)]})
    assert nodes.keeping.run() is False
    assert nodes.done == ["start 0", "start 1", "drain 1", "drain 1"]


def test_an_error_that_nobody_foresaw_drains_all_before_it_is_raised() -> None:
    nodes = PlayedNodes({100: [LookupError("what is this")], 104: [News(0, None, 0), News(1, None, 0)]})
    with pytest.raises(LookupError):
        nodes.keeping.run()
    assert nodes.now == 104
    assert nodes.done == ["start 0", "start 1", "drain 1", "drain 0"]
    assert "all nodes end, because of LookupError: what is this" in nodes.said


def test_nodes_that_are_lost_with_ray_are_not_waited_for() -> None:
    nodes = PlayedNodes({TICK_S: [OmniError("Ray has ended")]})
    with pytest.raises(OmniError, match="Ray has ended"):
        nodes.keeping.run()
    assert nodes.done == ["start 0", "start 1"]


def test_what_is_said_has_been_done() -> None:
    nodes = PlayedNodes({})

    def say(line: str) -> None:
        assert nodes.done == ["start 0"]
        raise OmniError(line)

    nodes.keeping.say = say
    with pytest.raises(OmniError, match="node 0: start"):
        nodes.keeping.run()


def test_a_node_that_ends_by_itself_is_started_again_whatever_its_code() -> None:
    ended: Plan = {100: [News(0, None, 0)], 200: [News(1, None, 1)], 300: [News(2, None, -9)]}
    nodes = PlayedNodes(ended | {400: [SIGNAL, News(3, None, 0), News(4, None, 0)]})
    assert nodes.keeping.run() is True
    assert [action for action in nodes.done if "start" in action] == [f"start {number}" for number in range(5)]
