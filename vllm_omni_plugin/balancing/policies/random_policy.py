"""Chooses a replica uniformly at random."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.interface import DecidingBalancer, Decision, ReplicaView, Task, require_replicas


class RandomBalancer(DecidingBalancer):
    """Picks every replica with the same probability. The reason is `random`; there is no fallback."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        require_replicas(replicas)
        return Decision(self._rng.randrange(len(replicas)), "random")
