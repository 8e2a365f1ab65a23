"""Sends fewer requests to new replicas, whose first requests compile kernels and fill caches."""

import random
from collections import Counter
from collections.abc import Sequence

from vllm_omni_plugin.balancing import Candidate, Decision, ReplicaView, Task, load_of
from vllm_omni_plugin.errors import ConfigError


class WarmUpBalancer:
    """Picks the replica with the fewest unfinished requests; those of a cold replica count several times.

    Args:
        requests: finished requests after which a replica is warm; 0 or more.
        weight: weight of a request on a cold replica; 1 or more.
        rng: source of randomness for ties.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(self, *, requests: int = 10, weight: float = 4.0, rng: random.Random | None = None) -> None:
        if requests < 0:
            raise ConfigError(f"option requests: {requests} is below 0")
        if weight < 1:
            raise ConfigError(f"option weight: {weight} is below 1")
        self._requests = requests
        self._weight = weight
        self._rng = rng or random.Random()
        self._finished: Counter[str] = Counter()

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """The index of the chosen replica. This is the only required method."""
        return self.decide(task, replicas).position

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """The choice with its reason, for traces, metrics and `/omni/explain`."""
        if not replicas:
            raise ValueError("replicas must not be empty")
        candidates = tuple(Candidate(position, self._score(replica)) for position, replica in enumerate(replicas))
        # The second value breaks ties at random.
        best = min(candidates, key=lambda candidate: (candidate.score, self._rng.random()))
        return Decision(best.position, "warm" if self._is_warm(replicas[best.position]) else "cold", candidates)

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """Count a finished request."""
        if output_tokens and not self._is_warm(replica):
            self._finished[replica.input_addr] += 1

    def replica_lost(self, replica: ReplicaView) -> None:
        """Delete the state of a lost replica, or memory would grow with every restart."""
        del self._finished[replica.input_addr]

    def _is_warm(self, replica: ReplicaView) -> bool:
        return self._finished[replica.input_addr] >= self._requests

    def _score(self, replica: ReplicaView) -> float:
        return (load_of(replica).requests + 1) * (1.0 if self._is_warm(replica) else self._weight)
