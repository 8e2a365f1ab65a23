"""Sampling of candidates, and the choice among them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing.loads.serving_replicas import ServingReplicas
from vllm_omni_plugin.balancing.sampling import few, sample

from .fakes import with_queues


@given(st.integers(min_value=1, max_value=12), st.integers(min_value=1, max_value=40), st.integers())
def test_positions_are_distinct_and_in_range(count: int, total: int, seed: int) -> None:
    positions = list(sample(count, total, random.Random(seed)))
    assert len(set(positions)) == len(positions) == min(count, total)
    assert all(0 <= position < total for position in positions)


@pytest.mark.parametrize("count", [3, 4])
def test_no_more_than_asked_for_are_all_of_them_in_order(count: int) -> None:
    assert list(sample(count, 3, random.Random(1))) == [0, 1, 2]


def test_every_position_is_drawn_equally_often() -> None:
    rng = random.Random(1)
    drawn = Counter(position for _ in range(3000) for position in sample(2, 6, rng))
    # Four standard deviations around 1,000; the seed makes the counts the same in every run.
    assert all(900 <= drawn[position] <= 1100 for position in range(6)), drawn


def test_of_a_fleet_that_knows_its_shortest_queue_that_one_is_among_the_few() -> None:
    lengths = [3] * 500
    lengths[321] = 1
    positions = few(ServingReplicas(with_queues(*lengths)), random.Random(1))
    assert 321 in positions
    assert len(set(positions)) == len(positions) == 4


def test_of_any_other_large_fleet_the_few_are_eight_at_random() -> None:
    assert len(set(few(with_queues(*[0] * 500), random.Random(1)))) == 8


def test_a_small_fleet_is_compared_as_a_whole() -> None:
    assert list(few(ServingReplicas(with_queues(*[0] * 8)), random.Random(1))) == list(range(8))
