"""The current state of the fleet as JSON data, for the page and the terminal."""

import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from vllm_omni_plugin.admin.head_drain import HeadDrain
from vllm_omni_plugin.admin.watch.token_rates import TokenRates
from vllm_omni_plugin.orchestrator import Orchestrator, PoolMember, StagePool
from vllm_omni_plugin.pipeline import Pipeline


@dataclass
class FleetView:
    """Computes the state on request, from data that any thread may read. `head` has its name and versions."""

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
                "refused": metrics.requests_failed["no_replica"] + metrics.requests_failed_before_accept,
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
