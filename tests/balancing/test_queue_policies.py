"""The policies that use queue lengths only, or nothing."""

import random

import pytest

from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.sampling import positions_to_compare

from .fakes import with_queues


@pytest.mark.parametrize("queue_lengths", [[-1], [0, -2, -1, 5]])
def test_a_negative_length_is_a_value_error(queue_lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^queue_length must be non-negative$"):
        LeastQueueLengthBalancer().select({}, with_queues(*queue_lengths))


@pytest.mark.parametrize(("total", "found"), [(9, 1.0), (256, 1.0), (1024, 0.25)])
def test_scores_are_compared_with_that_of_a_shortest_queue_of_up_to_256(total: int, found: float) -> None:
    rng, short = random.Random(1), total - 3
    replicas = with_queues(*(0 if position == short else 5 for position in range(total)))
    times = sum(short in positions_to_compare(replicas, rng) for _ in range(400))
    assert times / 400 == pytest.approx(found, abs=0.06)


def test_a_decision_of_a_large_fleet_lists_the_chosen_replica_only() -> None:
    decision = LeastQueueLengthBalancer().decide({}, with_queues(*[5] * 8, 3, *[4] * 8))
    assert [(candidate.position, candidate.score) for candidate in decision.candidates] == [(8, 3.0)]
