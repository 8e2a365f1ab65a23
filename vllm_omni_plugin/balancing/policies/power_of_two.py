"""The less loaded of two replicas drawn at random."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.interface import (
    Candidate,
    DecidingBalancer,
    Decision,
    ReplicaView,
    Task,
    require_replicas,
)
from vllm_omni_plugin.balancing.sampling import MOST_COMPARED, pick_lowest, sample

_CHOICES = 2
_LARGE_FLEET = 64
"""Replicas above which two choices are too few: the idle ones among many would be found too rarely."""


class PowerOfTwoBalancer(DecidingBalancer):
    """Draws two different replicas, eight in a fleet of more than 64, and takes the one with fewer unfinished requests.

    Source: power of d choices (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). Ties are
    broken at random. The reason of its decisions is `least-load`; it has no options and no fallback.

    Args:
        rng: source of randomness; a freshly seeded one of its own by default.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Compare the queue lengths of this moment. Raises ValueError when `replicas` is empty."""
        require_replicas(replicas)
        total = len(replicas)
        positions = sample(MOST_COMPARED if total > _LARGE_FLEET else _CHOICES, total, self._rng)
        lengths = [replicas[position].queue_length for position in positions]
        position = positions[pick_lowest(lengths, self._rng)]
        return Decision(position, "least-load", tuple(map(Candidate, positions, lengths)))
