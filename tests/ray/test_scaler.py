"""How many nodes there should be, by hand-computed cases."""

import pytest

from vllm_omni_plugin.ray.scaler import WINDOW_S, Load, Scaler

TARGET_S = 2.0
CALM = Load(serving=4, expected_wait=0.0)


def scaler(minimum: int = 1, maximum: int = 8) -> Scaler:
    return Scaler(minimum, maximum, TARGET_S)


@pytest.mark.parametrize(
    ("serving", "wait", "expected"),
    [
        pytest.param(1, 2.0, 1, id="at the target"),
        pytest.param(1, 2.1, 2, id="just above it"),
        pytest.param(1, 9.0, 5, id="in proportion to the wait"),
        pytest.param(1, 100.0, 8, id="never above the maximum"),
        pytest.param(0, 3.0, 2, id="none serves yet"),
        pytest.param(5, 3.0, 2, id="replicas of the head itself are no nodes"),
    ],
)
def test_more_are_wanted_at_once(serving: int, wait: float, expected: int) -> None:
    assert scaler().wanted(0.0, Load(serving, wait)) == expected


def test_nodes_that_still_start_are_not_asked_for_twice() -> None:
    it = scaler()
    assert [it.wanted(now, Load(1, 5.0)) for now in (0.0, 2.0, 4.0)] == [3, 3, 3]
    assert it.wanted(6.0, Load(3, 5.0)) == 8


def test_a_queue_that_grows_while_nodes_load_brings_more_only_after_a_window() -> None:
    it = scaler(maximum=50)
    waits = [(0.0, 5.0), (2.0, 15.0), (WINDOW_S - 1.0, 20.0)]
    assert [it.wanted(now, Load(1, wait)) for now, wait in waits] == [3, 3, 3]
    assert it.wanted(WINDOW_S, Load(1, 21.0)) == 11
    assert it.wanted(WINDOW_S + 2.0, Load(10, 30.0)) == 11
    assert it.wanted(WINDOW_S + 4.0, Load(11, 3.0)) == 17


def test_a_wait_beyond_all_numbers_brings_the_maximum() -> None:
    assert scaler(minimum=4).wanted(0.0, Load(4, 1e308)) == 8


def test_a_wait_for_which_fewer_would_do_takes_none_back() -> None:
    it = scaler()
    assert it.wanted(0.0, Load(1, 9.0)) == 5
    assert it.wanted(2.0, Load(1, 2.5)) == 5


def test_fewer_are_wanted_one_at_a_time_each_after_a_calm_window() -> None:
    it = scaler(minimum=2)
    assert it.wanted(0.0, Load(2, 4.0)) == 4
    assert it.wanted(1.0, CALM) == 4
    assert it.wanted(WINDOW_S, CALM) == 4
    assert it.wanted(1.0 + WINDOW_S, CALM) == 3
    assert it.wanted(2 * WINDOW_S, CALM) == 3
    assert it.wanted(1.0 + 2 * WINDOW_S, CALM) == 2
    assert it.wanted(1.0 + 9 * WINDOW_S, CALM) == 2


@pytest.mark.parametrize(
    "disturbance",
    [
        pytest.param(None, id="the head says nothing"),
        pytest.param(Load(4, TARGET_S), id="a wait near the target"),
    ],
)
def test_a_window_that_was_not_calm_throughout_begins_anew(disturbance: Load | None) -> None:
    it = scaler()
    assert it.wanted(0.0, Load(2, 8.0)) == 4
    it.wanted(1.0, CALM)
    assert it.wanted(WINDOW_S, disturbance) == 4
    assert it.wanted(WINDOW_S + 1.0, CALM) == 4
    assert it.wanted(2 * WINDOW_S, CALM) == 4
    assert it.wanted(2 * WINDOW_S + 1.0, CALM) == 3


def test_nothing_changes_while_no_head_answers() -> None:
    it = scaler(minimum=3)
    assert [it.wanted(now, None) for now in (0.0, WINDOW_S, 9 * WINDOW_S)] == [3, 3, 3]
