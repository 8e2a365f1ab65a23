"""The least-queue-length policy."""

import pytest

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


@pytest.mark.parametrize("queue_lengths", [[-1], [-1, 0], [0, -1], [0, -2, -1, 5]])
def test_a_negative_length_is_a_value_error(queue_lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^queue_length must be non-negative$"):
        LeastQueueLengthBalancer().select({}, with_queues(*queue_lengths))
