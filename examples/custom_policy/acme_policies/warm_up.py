"""Spares replicas that are new: their first requests compile kernels and fill caches."""

import random
from collections import Counter
from collections.abc import Sequence

from vllm_omni_plugin.balancing import Candidate, Decision, ReplicaView, Task, load_of
from vllm_omni_plugin.errors import ConfigError


class WarmUpBalancer:
    """Takes the replica with the fewest unfinished requests, those of one that is warming up counting several times.

    Args:
        requests: requests that a replica must have finished to be warm; 0 or more.
        weight: how often a request on a cold replica counts; 1 or more.
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
        """The index of the chosen replica. This method is all that a policy must have."""
        return self.decide(task, replicas).position

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """The same with its reasons, which then show up in traces, metrics and `/omni/explain`."""
        if not replicas:
            raise ValueError("replicas must not be empty")
        candidates = tuple(Candidate(position, self._score(replica)) for position, replica in enumerate(replicas))
        # The second value breaks ties at random; a fixed choice would fill an idle fleet from one end.
        best = min(candidates, key=lambda candidate: (candidate.score, self._rng.random()))
        return Decision(best.position, "warm" if self._is_warm(replicas[best.position]) else "cold", candidates)

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """Told when a request is over: here a replica warms up."""
        if output_tokens and not self._is_warm(replica):
            self._finished[replica.input_addr] += 1

    def replica_lost(self, replica: ReplicaView) -> None:
        """Told when a replica is lost: what is kept for it must go, or memory grows with every restart."""
        del self._finished[replica.input_addr]

    def _is_warm(self, replica: ReplicaView) -> bool:
        return self._finished[replica.input_addr] >= self._requests

    def _score(self, replica: ReplicaView) -> float:
        return (load_of(replica).requests + 1) * (1.0 if self._is_warm(replica) else self._weight)
