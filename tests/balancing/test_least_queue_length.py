"""The least-queue-length policy."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing import LeastQueueLengthBalancer

from .fakes import with_queues


@pytest.mark.parametrize(
    ("queue_lengths", "expected"),
    [
        pytest.param([4], 0, id="only one"),
        pytest.param([0, 1, 2], 0, id="first"),
        pytest.param([5, 1, 2], 1, id="middle"),
        pytest.param([5, 4, 2], 2, id="last"),
        pytest.param([3, 3, 2, 3], 2, id="ties that are not the shortest"),
        pytest.param([10**12, 10**12 - 1], 1, id="long"),
    ],
)
def test_the_shortest_queue_is_picked(queue_lengths: list[int], expected: int) -> None:
    assert LeastQueueLengthBalancer().select({}, with_queues(*queue_lengths)) == expected


@given(st.lists(st.integers(min_value=0, max_value=5), min_size=1), st.integers())
def test_no_other_queue_is_shorter(queue_lengths: list[int], seed: int) -> None:
    index = LeastQueueLengthBalancer(random.Random(seed)).select({}, with_queues(*queue_lengths))
    assert queue_lengths[index] == min(queue_lengths)


@pytest.mark.parametrize("queue_lengths", [[-1], [-1, 0], [0, -1], [0, -2, -1, 5]])
def test_a_negative_length_is_a_value_error(queue_lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^queue_length must be non-negative$"):
        LeastQueueLengthBalancer().select({}, with_queues(*queue_lengths))
