"""Chooses the less loaded of two random replicas."""

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
"""Above this number of replicas two choices would find an idle replica too rarely."""


class PowerOfTwoBalancer(DecidingBalancer):
    """Draws two replicas (eight in a fleet of more than 64), and takes the one with the fewest unfinished requests.

    Source: power of d choices (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). Ties are
    broken at random. The reason is `least-load`; there is no fallback.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        require_replicas(replicas)
        total = len(replicas)
        positions = sample(MOST_COMPARED if total > _LARGE_FLEET else _CHOICES, total, self._rng)
        lengths = [replicas[position].queue_length for position in positions]
        position = positions[pick_lowest(lengths, self._rng)]
        return Decision(position, "least-load", tuple(map(Candidate, positions, lengths)))
