"""The shortest queue wins."""

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
from vllm_omni_plugin.balancing.loads.serving_replicas import ServingReplicas
from vllm_omni_plugin.balancing.sampling import expected_arrivals, pick_lowest

_MAX_LISTED = 8
"""Replicas of which a decision lists all; to list more would take longer than to decide."""
_REASON = "least-load"


class LeastQueueLengthBalancer(DecidingBalancer):
    """Picks the replica with the fewest unfinished requests, ties uniformly at random.

    A fixed choice among ties would send every request of an idle fleet to the same replica. Exact in a fleet of any
    size: the pool's `ServingReplicas` know their shortest queue, any other sequence is searched.

    Args:
        rng: source of randomness; a freshly seeded one of its own by default.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Choose a shortest queue, reading each length at most once; the score is the queue length.

        Raises:
            ValueError: `replicas` is empty, or one of them reports a negative length.
        """
        require_replicas(replicas)
        if len(replicas) > _MAX_LISTED and isinstance(replicas, ServingReplicas):
            position = replicas.shortest(self._rng)
            chosen = Candidate(position, float(replicas[position].queue_length))
            return Decision(position, _REASON, (chosen,))
        lengths = [replica.queue_length for replica in replicas]
        if min(lengths) < 0:
            raise ValueError("queue_length must be non-negative")
        position = pick_lowest(lengths, self._rng, expected_arrivals(replicas, len(lengths)))
        listed = range(len(lengths)) if len(lengths) <= _MAX_LISTED else (position,)
        return Decision(position, _REASON, tuple(Candidate(place, float(lengths[place])) for place in listed))
