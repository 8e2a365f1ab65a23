"""Token rates and cache hit rates of replicas, from vLLM's own counters."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client.registry import CollectorRegistry

from vllm_omni_plugin.orchestrator.pool.pool_member import stage_and_replica

_COUNTERS = {
    "vllm:prompt_tokens_total": 0,
    "vllm:generation_tokens_total": 0,
    "vllm:prefix_cache_queries_total": 1,
    "vllm:prefix_cache_hits_total": 2,
}
"""vLLM's counters, with the index of the `TokenCounts` field to which each adds."""
_OVER_S = 11.0
"""A rate covers the time since the oldest reading of at most this age."""
_APART_S = 0.5
"""Minimum interval of two readings."""


class TokenCounts(NamedTuple):
    """vLLM's counts for one replica: all tokens, and prompt tokens looked up and found in the prefix cache."""

    tokens: float = 0.0
    queried: float = 0.0
    hits: float = 0.0


class TokenRates:
    """Computes rates from readings of vLLM's counters, if there are any. `before_reading` brings them up to date."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float], before_reading: Callable[[], None] = lambda: None
    ) -> None:
        self._counters = registry.restricted_registry(_COUNTERS)
        self._clock = clock
        self._before_reading = before_reading
        self._readings: deque[tuple[float, dict[str, TokenCounts]]] = deque()

    def read(self) -> None:
        """Take a reading, unless the last one is newer than 0.5 s."""
        now = self._clock()
        while self._readings and now - self._readings[0][0] > _OVER_S:
            self._readings.popleft()
        if self._readings and now - self._readings[-1][0] < _APART_S:
            return
        self._before_reading()
        counts: dict[str, list[float]] = {}
        for family in self._counters.collect():
            for sample in family.samples:
                stage_id, replica_id = stage_and_replica(int(sample.labels["engine"]))
                fields = counts.setdefault(f"{stage_id}.{replica_id}", [0.0, 0.0, 0.0])
                fields[_COUNTERS[sample.name]] += sample.value
        self._readings.append((now, {name: TokenCounts(*fields) for name, fields in counts.items()}))

    def reset(self) -> None:
        self._readings.clear()

    def rates_of(self, replica: str) -> tuple[float | None, float | None]:
        """Recent tokens per second, and the cache hit rate of prompt tokens, 0 to 1; None if unknown."""
        if not self._readings:
            return None, None
        (began_at, before), (ended_at, now) = self._readings[0], self._readings[-1]
        counts, first = now.get(replica), before.get(replica, TokenCounts())
        if counts is None:
            return None, None
        seconds = ended_at - began_at
        # The count drops if another replica has taken over the id.
        rate = max(0.0, counts.tokens - first.tokens) / seconds if seconds else None
        return rate, counts.hits / counts.queried if counts.queried else None
