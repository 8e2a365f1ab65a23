"""The estimate for other heads, and choices that respect it."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.balancing.pool import PooledReplica
from vllm_omni_plugin.balancing import (
    LeastQueueLengthBalancer,
    ReplicaLoad,
    ServingReplicas,
    UnreportedRequests,
    expected_arrivals,
    pick_lowest,
)
from vllm_omni_plugin.balancing.sampling import draw_by_water_filling


def heads(number: int) -> UnreportedRequests:
    unreported = UnreportedRequests()
    unreported.set_heads(number)
    return unreported


def dispatch(unreported: UnreportedRequests) -> None:
    unreported.estimate(0.0, in_flight=0)
    unreported.in_flight += 1


def replicas(queues: list[int], unreported: UnreportedRequests) -> ServingReplicas[PooledReplica]:
    return ServingReplicas([PooledReplica(n, ReplicaLoad(requests=q)) for n, q in enumerate(queues)], unreported)


@pytest.mark.parametrize(
    ("number", "sent", "ended", "now", "in_flight", "expected"),
    [
        pytest.param(4, 3, 0, 0.0, 12, 9.0, id="as much as this head"),
        pytest.param(2, 99, 50, 0.0, 49, 99 * 1 / 50, id="little by one that stands by"),
        pytest.param(2, 99, 50, 0.0, 49 + 199, 99 * 200 / 50, id="in proportion of what they have"),
        pytest.param(4, 1, 1, 0.0, 0, 3.0, id="alike before anything is in flight"),
        pytest.param(4, 1, 0, 10.0, 4, 0.0, id="what was sent long ago has been reported"),
    ],
)
def test_the_estimate_of_unreported_requests(
    number: int, sent: int, ended: int, now: float, in_flight: int, expected: float
) -> None:
    unreported = heads(number)
    for _ in range(sent):
        dispatch(unreported)
    unreported.in_flight -= ended
    unreported.estimate(now, in_flight)
    assert unreported.requests == pytest.approx(expected, abs=1e-9)


def test_a_single_head_estimates_nothing() -> None:
    unreported = heads(2)
    dispatch(unreported)
    unreported.estimate(0.0, in_flight=2)
    assert unreported.requests > 0
    unreported.set_heads(1)
    assert unreported.requests == 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(1, 50)), min_size=1, max_size=10, unique_by=lambda level: level[0]
    ),
    st.floats(1e-6, 1e6),
    st.integers(),
)
def test_no_level_above_the_filled_height_is_drawn(levels: list[tuple[int, int]], coming: float, seed: int) -> None:
    levels.sort()
    index = draw_by_water_filling(levels, coming, random.Random(seed))
    room_below = sum(places * (levels[index][0] - level) for level, places in levels[:index])
    assert room_below < coming


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.floats(0, 1e6), st.integers())
def test_with_several_heads_one_of_the_low_scores_is_picked(scores: list[float], coming: float, seed: int) -> None:
    place = pick_lowest(scores, random.Random(seed), coming)
    assert scores[place] <= min(scores) + coming


def test_heads_with_the_same_view_fill_short_queues_evenly() -> None:
    """Herding: without the estimate all heads would choose the same shortest queue."""
    queues = [0, *[4] * 9]
    policies = [LeastQueueLengthBalancer(random.Random(seed)) for seed in range(8)]
    sent: Counter[int] = Counter()
    for policy in policies:
        unreported = heads(8)
        view = replicas(queues, unreported)
        for _ in range(5):
            unreported.estimate(0.0, in_flight=0)
            position = policy.decide({}, view).position
            sent[position] += 1
            view[position].charge(1)
            view.queue_lengths[position] += 1
    # 40 requests fill all to 7.6; by the shortest queue each head would have sent its first four to one replica.
    assert sent[0] <= 20
    assert len(sent) == 10


def test_expected_arrivals_are_proportional_to_the_compared_replicas() -> None:
    unreported = heads(3)
    dispatch(unreported)
    unreported.estimate(0.0, in_flight=3)
    assert expected_arrivals(replicas([0] * 8, unreported), 2) == pytest.approx(0.5)
    assert expected_arrivals([PooledReplica(0, ReplicaLoad())], 1) == 0.0
