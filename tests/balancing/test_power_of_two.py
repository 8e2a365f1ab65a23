"""The power-of-two policy."""

import random

import pytest

from vllm_omni_plugin.balancing import PowerOfTwoBalancer

from .fakes import with_queues


@pytest.mark.parametrize(("queue_lengths", "expected"), [([5], 0), ([5, 4], 1), ([0, 9], 0)])
def test_up_to_two_replicas_are_all_compared(queue_lengths: list[int], expected: int) -> None:
    assert PowerOfTwoBalancer().select({}, with_queues(*queue_lengths)) == expected


@pytest.mark.parametrize(("total", "compared"), [(1, 1), (2, 2), (3, 2), (64, 2), (65, 8), (1024, 8)])
def test_two_are_drawn_and_eight_of_a_large_fleet(total: int, compared: int) -> None:
    decision = PowerOfTwoBalancer(random.Random(1)).decide({}, with_queues(*range(total)))
    assert len({candidate.position for candidate in decision.candidates}) == compared
    # The queue lengths are the positions.
    assert decision.position == min(candidate.position for candidate in decision.candidates)
    assert decision.reason == "least-load"


def test_the_longest_queue_is_never_chosen_among_three() -> None:
    balancer, replicas = PowerOfTwoBalancer(random.Random(1)), with_queues(1, 9, 2)
    assert {balancer.select({}, replicas) for _ in range(200)} == {0, 2}


def test_the_queue_length_is_that_of_the_moment() -> None:
    balancer = PowerOfTwoBalancer()
    assert [balancer.select({}, with_queues(*lengths)) for lengths in ([1, 0], [1, 2], [3, 2])] == [1, 0, 1]
