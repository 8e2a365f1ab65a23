"""Uniformly random choice: needs no state and no load report."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.interface import DecidingBalancer, Decision, ReplicaView, Task, require_replicas


class RandomBalancer(DecidingBalancer):
    """Picks every replica with the same probability, whatever its load. The reason is `random`; there is no fallback.

    Args:
        rng: source of randomness; a freshly seeded one of its own by default.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Choose uniformly at random. Raises ValueError when `replicas` is empty."""
        require_replicas(replicas)
        return Decision(self._rng.randrange(len(replicas)), "random")
