"""The shortest queue wins."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.base import LoadBalancer, ReplicaView, Task, require_replicas


class LeastQueueLengthBalancer(LoadBalancer):
    """Picks the replica with the fewest unfinished requests, ties uniformly at random.

    A fixed choice among ties would send every request of an idle fleet to the same replica.

    Args:
        rng: source of randomness; a freshly seeded one of its own by default.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """Return the index of a shortest queue, reading each length once.

        Raises:
            ValueError: `replicas` is empty, or one of them reports a negative length.
        """
        require_replicas(replicas)
        ties = _shortest_queues(replicas)
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)


def _shortest_queues(replicas: Sequence[ReplicaView]) -> list[int]:
    shortest = replicas[0].queue_length
    ties: list[int] = []
    for index, replica in enumerate(replicas):
        length = replica.queue_length
        if length > shortest:
            continue
        if length < shortest:
            shortest = length
            ties.clear()
        ties.append(index)
    if shortest < 0:
        raise ValueError("queue_length must be non-negative")
    return ties
