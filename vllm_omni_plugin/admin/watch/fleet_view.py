"""The current state of the fleet as JSON data, for the page and the terminal, with rates from vLLM counters."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

from prometheus_client.registry import CollectorRegistry

from vllm_omni_plugin.admin.operator_actions import HeadDrain
from vllm_omni_plugin.orchestrator import Orchestrator, PoolMember, StagePool
from vllm_omni_plugin.orchestrator.pool.pool_member import stage_and_replica
from vllm_omni_plugin.pipeline import Pipeline

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


@dataclass
class FleetView:
    """Computes the state for `page.js` and `top.py`, from data that any thread may read. `head`: its name, versions."""

    orchestrator: Orchestrator
    drain: HeadDrain
    is_ending: Callable[[], bool]
    rates: TokenRates
    head: Mapping[str, str]
    pipeline: InitVar[Pipeline | None]
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _graph: dict[int, dict[str, Any]] = field(init=False)

    def __post_init__(self, pipeline: Pipeline | None) -> None:
        self._graph = {} if pipeline is None else _graph(pipeline)

    def state(self) -> dict[str, Any]:
        metrics = self.orchestrator.metrics
        # Of admission. The orchestrator's thread may add a reason meanwhile.
        refused = (*metrics.requests_refused.copy().values(), *metrics.requests_refused_before_accept.values())
        exchange = self.orchestrator.stage_pools[0].exchange
        now = self.clock()
        return {
            "time": self.wall_clock(),
            "head": {
                **self.head,
                "state": "ending" if self.is_ending() else "draining" if self.drain.active else "up",
                "coordinator": metrics.coordinator_connected,
                "others": [] if exchange is None else sorted(exchange.others),
            },
            "requests": {
                "unfinished": len(self.orchestrator.request_states),
                "queued": self.orchestrator.front_end.queued + metrics.queued,
                "held_http": metrics.held_before_accept,
                "held_fleet": metrics.held,
                "held_move": metrics.moves_waiting,
                "held_paused": metrics.paused,
                "moved": metrics.moves,
                "lost": metrics.requests_failed["replica_lost"] + metrics.requests_failed["query_of_death"],
                "refused": metrics.requests_failed["no_replica"] + metrics.requests_failed_before_accept + sum(refused),
            },
            "stages": [self._stage(pool, now) for pool in self.orchestrator.stage_pools],
        }

    def sample(self) -> dict[str, Any]:
        metrics = self.orchestrator.metrics
        members = [member for pool in self.orchestrator.stage_pools for member in pool.members]
        return {
            "time": self.wall_clock(),
            "unfinished": len(self.orchestrator.request_states),
            "held": metrics.held_before_accept + metrics.held + metrics.moves_waiting + metrics.paused,
            "tokens_per_second": sum(self.rates.rates_of(member.name)[0] or 0.0 for member in members),
            "kv_usage": max((member.ledger.uncached_load().kv_usage for member in members), default=0.0),
        }

    def _stage(self, pool: StagePool, now: float) -> dict[str, Any]:
        return {
            "stage": pool.stage_id,
            "policy": pool.policy,
            **self._graph.get(pool.stage_id, {"name": "", "level": 0, "inputs": [], "output": ""}),
            "replicas": [self._replica(member, now) for member in pool.members],
        }

    def _replica(self, member: PoolMember, now: float) -> dict[str, Any]:
        load, client = member.ledger.uncached_load(), member.client
        rate, hit_rate = self.rates.rates_of(member.name)
        return {
            "id": member.name,
            "status": member.state,
            "other_generation": member.other_generation,
            "cordons": sorted(member.cordons),
            "remote": member.remote,
            "address": member.input_addr if member.remote else "",
            "machines": list(member.machines),
            "requests": load.requests,
            "others": load.others,
            "waiting": load.waiting,
            "tokens": load.prefill_tokens + load.decode_tokens,
            "kv_tokens": load.kv_blocks * load.block_size,
            "kv_usage": load.kv_usage,
            "tokens_per_second": rate,
            "hit_rate": hit_rate,
            "heartbeat_seconds": None
            if client is None or not client.answered_at
            else max(0.0, now - client.answered_at),
            "since_seconds": now - member.changed_at if member.changed_at else None,
            "restarts": member.restarts,
            "assigned": member.assignments,
        }


def _graph(pipeline: Pipeline) -> dict[int, dict[str, Any]]:
    """What the page needs to draw each stage; `level` is its distance from the request."""
    return {
        stage.id: {
            "name": stage.name,
            "level": level,
            "inputs": [upstream.id for upstream in pipeline.upstream(stage)],
            "output": str(stage.output) if stage.final else "",
        }
        for level, stages in enumerate(pipeline.levels)
        for stage in stages
    }
