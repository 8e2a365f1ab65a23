"""Chooses the replica with the shortest queue."""

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
from vllm_omni_plugin.balancing.sampling import expected_arrivals, pick_lowest, queue_lengths_of

_MAX_LISTED = 8
"""A decision lists all replicas up to this number; a longer list would take longer than the decision."""
_REASON = "least-load"


class LeastQueueLengthBalancer(DecidingBalancer):
    """Picks the replica with the fewest unfinished requests, ties uniformly at random.

    The reason is `least-load`; there is no fallback.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        require_replicas(replicas)
        lengths = queue_lengths_of(replicas)
        position = pick_lowest(lengths, self._rng, expected_arrivals(replicas, len(lengths)))
        if lengths[position] < 0:
            raise ValueError("queue_length must be non-negative")
        if len(lengths) > _MAX_LISTED:
            return Decision(position, _REASON, (Candidate(position, float(lengths[position])),))
        return Decision(position, _REASON, tuple(map(Candidate, range(len(lengths)), map(float, lengths))))
