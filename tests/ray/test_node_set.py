"""Which nodes are started, drained and killed, without any."""

from vllm_omni_plugin.ray.node_set import GRACE_S, PAUSE_S, Do, NodeSet

DRAIN_S = 300.0
LATE = 1000.0
"""After all nodes have run long enough that their ends are no failures of the start."""


def running(count: int) -> NodeSet:
    nodes = NodeSet(DRAIN_S)
    for _, number in nodes.decide(0.0, count):
        nodes.placed(0.0, number)
    return nodes


def test_as_many_are_started_as_are_missing_and_only_once() -> None:
    nodes = NodeSet(DRAIN_S)
    assert nodes.decide(0.0, 2) == [(Do.START, 0), (Do.START, 1)]
    assert nodes.decide(1.0, 2) == []
    assert nodes.decide(2.0, 3) == [(Do.START, 2)]


def test_one_that_dies_is_replaced_at_once_under_a_new_number() -> None:
    nodes = running(2)
    nodes.ended(LATE, 0)
    assert nodes.decide(LATE, 2) == [(Do.START, 2)]


def test_one_that_ends_soon_after_its_start_is_replaced_after_a_pause() -> None:
    nodes = running(2)
    assert nodes.ended(5.0, 0) is False
    assert nodes.decide(5.0 + PAUSE_S - 1, 2) == []
    assert nodes.decide(5.0 + PAUSE_S, 2) == [(Do.START, 2)]


def test_the_time_in_which_ray_has_no_room_is_not_counted_as_life() -> None:
    nodes = NodeSet(DRAIN_S)
    nodes.decide(0.0, 1)
    nodes.placed(LATE, 0)
    nodes.ended(LATE + 1, 0)
    assert nodes.decide(LATE + 1, 1) == []


def test_the_newest_drain_and_are_not_replaced() -> None:
    nodes = running(3)
    assert nodes.decide(LATE, 1) == [(Do.DRAIN, 2), (Do.DRAIN, 1)]
    assert nodes.draining() == [1, 2]
    assert nodes.decide(LATE + 1, 1) == []
    nodes.ended(LATE + 2, 2)
    assert nodes.decide(LATE + 2, 1) == []


def test_one_that_was_told_to_end_soon_after_its_start_delays_no_other() -> None:
    nodes = running(2)
    nodes.decide(1.0, 1)
    nodes.ended(2.0, 1)
    assert nodes.decide(2.0, 2) == [(Do.START, 2)]


def test_one_that_drains_does_not_count_when_more_are_wanted_again() -> None:
    nodes = running(2)
    nodes.decide(LATE, 1)
    assert nodes.decide(LATE + 1, 2) == [(Do.START, 2)]


def test_one_that_drains_too_long_is_killed() -> None:
    nodes = running(2)
    nodes.decide(LATE, 1)
    assert nodes.decide(LATE + DRAIN_S + GRACE_S, 1) == []
    assert nodes.decide(LATE + DRAIN_S + GRACE_S + 1, 1) == [(Do.KILL, 1)]


def test_one_that_ray_has_no_room_for_is_taken_back() -> None:
    nodes = NodeSet(DRAIN_S)
    nodes.decide(0.0, 1)
    assert nodes.decide(1.0, 0) == [(Do.KILL, 0)]
    assert nodes.draining() == []
    assert len(nodes) == 1
    nodes.ended(2.0, 0)
    assert len(nodes) == 0


def test_those_without_room_go_before_those_that_run() -> None:
    nodes = running(2)
    nodes.decide(1.0, 5)
    nodes.placed(2.0, 4)
    assert nodes.decide(LATE, 1) == [(Do.KILL, 3), (Do.KILL, 2), (Do.DRAIN, 4), (Do.DRAIN, 1)]


def test_what_has_run_for_a_minute_is_remembered_and_a_wait_for_room_is_no_run() -> None:
    nodes = running(1)
    nodes.decide(0.0, 2)
    assert nodes.ended(59.0, 0) is False
    assert nodes.ended(LATE, 1) is False
    nodes.decide(LATE, 2)
    nodes.placed(LATE, 2)
    assert nodes.ended(LATE + 60.0, 2) is True
    assert nodes.ended(LATE + 61.0, 3) is True
