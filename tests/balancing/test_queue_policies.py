"""The policies that use queue lengths only, or nothing."""

import random
from collections import Counter

import pytest

from vllm_omni_plugin.balancing import LeastQueueLengthBalancer, RandomBalancer

from .fakes import with_queues


@pytest.mark.parametrize("queue_lengths", [[-1], [0, -2, -1, 5]])
def test_a_negative_length_is_a_value_error(queue_lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^queue_length must be non-negative$"):
        LeastQueueLengthBalancer().select({}, with_queues(*queue_lengths))


def test_random_picks_every_replica_equally_often() -> None:
    balancer = RandomBalancer(random.Random(1))
    picks = Counter(balancer.select({}, with_queues(0, 7, 1000)) for _ in range(3000))
    # Three standard deviations around 1,000; the seed makes the counts the same in every run.
    assert all(920 <= picks[index] <= 1080 for index in range(3)), picks


@pytest.mark.parametrize("size", [4, 40])
def test_the_shortest_queue_wins_and_ties_are_broken_uniformly(size: int) -> None:
    balancer = LeastQueueLengthBalancer(random.Random(1))
    lengths = [2, *[1] * (size - 1)]
    picks = Counter(balancer.select({}, with_queues(*lengths)) for _ in range(1000 * (size - 1)))
    assert picks.keys() == set(range(1, size))
    assert all(850 <= count <= 1150 for count in picks.values()), picks


def test_a_decision_of_a_large_fleet_lists_the_chosen_replica_only() -> None:
    decision = LeastQueueLengthBalancer().decide({}, with_queues(*[5] * 8, 3, *[4] * 8))
    assert [(candidate.position, candidate.score) for candidate in decision.candidates] == [(8, 3.0)]
