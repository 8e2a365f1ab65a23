"""The rules of other load balancers, written from their published descriptions.

They get the benefit of the doubt: no delays beyond the documented ones, and exact knowledge of the caches if the rule
does not say how it learns what is cached.
"""

import random
import sys
from collections.abc import Sequence

from simulator.replica import SimReplica
from vllm_omni_plugin.balancing import Decision, Task
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.balancing.caches.prefix_caches import PrefixCaches


class PlainRoundRobin:
    """A counter modulo the number of replicas."""

    def __init__(self, rng: random.Random) -> None:
        self._next = 0

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        self._next += 1
        return self._next % len(replicas)


class StaleLeastQueue:
    """vllm-omni 0.30: the shortest queue in the last heartbeats, one every 5 s. It does not count its own requests."""

    tick_s = 5.0

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._reported: dict[int, int] = {}

    def tick(self, replicas: Sequence[SimReplica]) -> None:
        self._reported = {replica.replica_id: replica.queue_length for replica in replicas}

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        lengths = [self._reported.get(replica.replica_id, 0) for replica in replicas]
        shortest = min(lengths)
        return self._rng.choice([place for place, length in enumerate(lengths) if length == shortest])


class VllmDataParallel:
    """vLLM 0.32, one API server: `max(in flight, waiting + running) + waiting * 6 * max(0, kv usage - 0.5)`.

    The engines' counts come by pushes every 100 ms; own requests count at once. Ties go to the first replica from a
    start index that advances with every request.
    """

    tick_s = 0.1

    def __init__(self, rng: random.Random) -> None:
        self._counts: dict[int, list[float]] = {}
        self._start = 0

    def tick(self, replicas: Sequence[SimReplica]) -> None:
        """A push of the coordinator: waiting, running and KV usage of every engine."""
        self._counts = {replica.replica_id: [*map(float, replica.report())] for replica in replicas}

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        places = [(self._start + step) % len(replicas) for step in range(len(replicas))]
        chosen = min(places, key=lambda place: self._score(replicas[place]))
        self._counts_of(replicas[chosen])[0] += 1
        self._start = (self._start + 1) % len(replicas)
        return chosen

    def _score(self, replica: SimReplica) -> float:
        waiting, running, kv_usage = self._counts_of(replica)
        return max(replica.queue_length, waiting + running) + waiting * 6.0 * max(0.0, kv_usage - 0.5)

    def _counts_of(self, replica: SimReplica) -> list[float]:
        return self._counts.setdefault(replica.replica_id, [0.0, 0.0, 0.0])


class LMetric:
    """LMetric: the smallest product of prompt tokens to compute and requests, `(prompt - matched) * (load + 1)`.

    Here it knows exactly what is cached, or will be once the waiting requests are computed.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def decide(self, task: Task, replicas: Sequence[SimReplica]) -> Decision:
        prompt = task["prompt"]
        keys, total = prompt_keys(prompt, replicas[0].engine.settings.block_size), len(prompt.token_ids)
        matched = [replica.matched_tokens(keys, total) for replica in replicas]
        scores = [
            (total - tokens) * (replica.queue_length + 1) for tokens, replica in zip(matched, replicas, strict=True)
        ]
        lowest = min(scores)
        place = self._rng.choice([place for place, score in enumerate(scores) if score == lowest])
        return Decision(place, "lowest-product", matched_tokens=matched[place])

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        return self.decide(task, replicas).position


class SglangCacheAware:
    """SGLang's cache-aware rule: the longest match if it is over 0.3 of the prompt, else the least loaded replica.

    If loads differ by more than 64 and by more than half, the least loaded replica. Caches are estimated from the
    dispatched requests.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sent = PrefixCaches()

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        loads = [replica.queue_length for replica in replicas]
        lowest, highest = min(loads), max(loads)
        least = self._rng.choice([place for place, load in enumerate(loads) if load == lowest])
        if highest - lowest > 64 and highest > 1.5 * lowest:
            return least
        size, prompt = replicas[0].engine.settings.block_size, task["prompt"]
        for blocks, holders in reversed(self._sent.levels(prompt_keys(prompt, size))):
            for place, replica in enumerate(replicas):
                if holders >> replica.replica_id & 1:
                    return place if blocks * size > 0.3 * len(prompt.token_ids) else least
        return least

    def dispatched(self, task: Task, replica: SimReplica, decision: Decision) -> None:
        keys = prompt_keys(task["prompt"], replica.engine.settings.block_size)
        self._sent.estimate(replica.replica_id, keys, sys.maxsize)

    def replica_lost(self, replica: SimReplica) -> None:
        self._sent.clear(replica.replica_id)
