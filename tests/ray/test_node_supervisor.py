"""`NodeSet` by itself, and `NodeSupervisor` with simulated nodes and a simulated clock."""

from itertools import count

import pytest

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.ray.node_supervisor import (
    GRACE_S,
    PAUSE_S,
    TICK_S,
    NodeAction,
    NodeGroup,
    NodeSet,
    NodeSupervisor,
)
from vllm_omni_plugin.ray.ray_nodes import NodeEvent

DRAIN_S = 300.0
LATE = 1000.0
"""After all nodes have settled."""


def running(count: int) -> NodeSet:
    nodes = NodeSet(DRAIN_S)
    for _, number in nodes.decide(0.0, count):
        nodes.placed(0.0, number)
    return nodes


def test_missing_nodes_are_started_once() -> None:
    nodes = NodeSet(DRAIN_S)
    assert nodes.decide(0.0, 2) == [(NodeAction.START, 0), (NodeAction.START, 1)]
    assert nodes.decide(1.0, 2) == []
    assert nodes.decide(2.0, 3) == [(NodeAction.START, 2)]


def test_a_dead_node_is_replaced_at_once_under_a_new_number() -> None:
    nodes = running(2)
    nodes.ended(LATE, 0)
    assert nodes.decide(LATE, 2) == [(NodeAction.START, 2)]


def test_a_node_that_ends_soon_is_replaced_after_a_pause() -> None:
    nodes = running(2)
    assert nodes.ended(5.0, 0) is False
    assert nodes.decide(5.0 + PAUSE_S - 1, 2) == []
    assert nodes.decide(5.0 + PAUSE_S, 2) == [(NodeAction.START, 2)]


def test_the_newest_nodes_drain_and_are_not_replaced() -> None:
    nodes = running(3)
    assert nodes.decide(LATE, 1) == [(NodeAction.DRAIN, 2), (NodeAction.DRAIN, 1)]
    assert nodes.draining() == [1, 2]
    assert nodes.decide(LATE + 1, 1) == []
    nodes.ended(LATE + 2, 2)
    assert nodes.decide(LATE + 2, 1) == []


def test_a_node_that_drains_too_long_is_killed() -> None:
    nodes = running(2)
    nodes.decide(LATE, 1)
    assert nodes.decide(LATE + DRAIN_S + GRACE_S, 1) == []
    assert nodes.decide(LATE + DRAIN_S + GRACE_S + 1, 1) == [(NodeAction.KILL, 1)]


def test_a_node_without_a_machine_is_cancelled() -> None:
    nodes = NodeSet(DRAIN_S)
    nodes.decide(0.0, 1)
    assert nodes.decide(1.0, 0) == [(NodeAction.KILL, 0)]
    assert nodes.draining() == []
    assert len(nodes) == 1
    nodes.ended(2.0, 0)
    assert len(nodes) == 0


def test_a_settled_node_is_remembered_and_waiting_for_a_machine_does_not_count() -> None:
    nodes = running(1)
    nodes.decide(0.0, 2)
    assert nodes.ended(59.0, 0) is False
    assert nodes.ended(LATE, 1) is False
    nodes.decide(LATE, 2)
    nodes.placed(LATE, 2)
    assert nodes.ended(LATE + 60.0, 2) is True
    assert nodes.ended(LATE + 61.0, 3) is True


SIGNAL = "a signal"
Plan = dict[float, list[NodeEvent | str | Exception]]


class SimulatedNodes:
    """Records the actions, and produces the planned events, signals and errors at their times in seconds."""

    def __init__(self, plan: Plan, *wanted: int) -> None:
        self._plan = plan
        self.now = 0.0
        self.done: list[str] = []
        self.waiting: list[NodeEvent] = []
        self.reported: list[str] = []
        self.kinds: dict[int, int] = {}
        numbers = count()
        groups = [NodeGroup(NodeSet(10.0, numbers), lambda now, number=number: number) for number in wanted or [2]]
        self.supervisor = NodeSupervisor(self, groups, lambda: self.now, self.reported.append)

    def start(self, number: int, kind: int) -> None:
        self.done.append(f"start {number}")
        self.kinds[number] = kind
        self.waiting.append(NodeEvent(number, f"host{number}"))

    def drain(self, number: int) -> None:
        self.done.append(f"drain {number}")

    def kill(self, number: int) -> None:
        self.done.append(f"kill {number}")
        self.waiting.append(NodeEvent(number, None, "killed"))

    def events(self, timeout: float) -> list[NodeEvent]:
        assert self.now < 1000.0, self.reported
        self.now += timeout
        for event in self._plan.get(self.now, []):
            if isinstance(event, NodeEvent):
                self.waiting.append(event)
            elif isinstance(event, Exception):
                raise event
            else:
                self.supervisor.signals += 1
        events, self.waiting = self.waiting, []
        return events


def test_a_lost_node_is_replaced_and_a_signal_drains_all() -> None:
    lost = NodeEvent(0, None, "its machine died")
    nodes = SimulatedNodes({100: [lost], 200: [SIGNAL], 204: [NodeEvent(1, None, 0), NodeEvent(2, None, 0)]})
    assert nodes.supervisor.run() is True
    assert nodes.done == ["start 0", "start 1", "start 2", "drain 2", "drain 1"]
    assert "node 0: lost, its machine died" in nodes.reported
    assert "node 2: runs on host2" in nodes.reported
    assert "node 1: ended with code 0" in nodes.reported


def test_each_stage_has_its_number_of_nodes_of_its_kind() -> None:
    ends = [NodeEvent(number, None, 0) for number in (0, 1, 3)]
    nodes = SimulatedNodes({100: [NodeEvent(2, None, "its machine died")], 200: [SIGNAL], 204: ends}, 1, 2)
    nodes.supervisor.groups = [group._replace(name=f" of stage {n}") for n, group in enumerate(nodes.supervisor.groups)]
    assert nodes.supervisor.run() is True
    assert nodes.kinds == {0: 0, 1: 1, 2: 1, 3: 1}
    assert nodes.done == ["start 0", "start 1", "start 2", "start 3", "drain 0", "drain 3", "drain 1"]
    assert "node 2 of stage 1: lost, its machine died" in nodes.reported


def test_a_stage_whose_command_line_is_refused_ends_the_others() -> None:
    nodes = SimulatedNodes({4: [NodeEvent(1, None, 2)], 8: [NodeEvent(0, None, 0)]}, 1, 1)
    assert nodes.supervisor.run() is False
    assert nodes.done == ["start 0", "start 1", "drain 0"]


def test_nodes_that_do_not_drain_in_time_are_killed() -> None:
    nodes = SimulatedNodes({100: [SIGNAL]})
    assert nodes.supervisor.run() is True
    assert nodes.done[2:] == ["drain 1", "drain 0", "kill 0", "kill 1"]
    assert nodes.now <= 100 + 10 + 30 + 3 * TICK_S


def test_a_refused_command_line_ends_all_nodes() -> None:
    nodes = SimulatedNodes({4: [NodeEvent(0, None, 2)], 8: [NodeEvent(1, None, 2)]})
    assert nodes.supervisor.run() is False
    assert nodes.done == ["start 0", "start 1", "drain 1"]
    assert sum("command line" in line for line in nodes.reported) == 1


def test_a_node_refused_after_others_have_settled_is_replaced() -> None:
    ends = [SIGNAL, NodeEvent(1, None, 0), NodeEvent(3, None, 0)]
    nodes = SimulatedNodes({100: [NodeEvent(0, None, -9)], 104: [NodeEvent(2, None, 2)], 200: ends})
    assert nodes.supervisor.run() is True
    assert nodes.done == ["start 0", "start 1", "start 2", "start 3"]


def test_an_unexpected_error_drains_all_nodes_before_it_is_raised() -> None:
    nodes = SimulatedNodes({100: [LookupError("what is this")], 104: [NodeEvent(0, None, 0), NodeEvent(1, None, 0)]})
    with pytest.raises(LookupError):
        nodes.supervisor.run()
    assert nodes.now == 104
    assert nodes.done == ["start 0", "start 1", "drain 1", "drain 0"]
    assert "all nodes end, because of LookupError: what is this" in nodes.reported


def test_the_end_of_ray_ends_the_run_at_once() -> None:
    nodes = SimulatedNodes({TICK_S: [OmniError("Ray has ended")]})
    with pytest.raises(OmniError, match="Ray has ended"):
        nodes.supervisor.run()
    assert nodes.done == ["start 0", "start 1"]


def test_an_action_is_logged_after_it_was_run() -> None:
    nodes = SimulatedNodes({})

    def report(line: str) -> None:
        assert nodes.done == ["start 0"]
        raise OmniError(line)

    nodes.supervisor.report = report
    with pytest.raises(OmniError, match="node 0: start"):
        nodes.supervisor.run()


def test_a_node_that_ends_by_itself_is_replaced_for_any_exit_code() -> None:
    ended: Plan = {100: [NodeEvent(0, None, 0)], 200: [NodeEvent(1, None, 1)], 300: [NodeEvent(2, None, -9)]}
    nodes = SimulatedNodes(ended | {400: [SIGNAL, NodeEvent(3, None, 0), NodeEvent(4, None, 0)]})
    assert nodes.supervisor.run() is True
    assert [action for action in nodes.done if "start" in action] == [f"start {number}" for number in range(5)]
