"""Uniformly random choice: needs no state and no load report."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.base import LoadBalancer, ReplicaView, Task, require_replicas


class RandomBalancer(LoadBalancer):
    """Picks every replica with the same probability, whatever its load.

    Args:
        rng: source of randomness; a freshly seeded one of its own by default.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """Return a uniformly random index. Raises ValueError when `replicas` is empty."""
        require_replicas(replicas)
        return self._rng.randrange(len(replicas))
