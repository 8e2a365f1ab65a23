"""What a stage as a whole has to do, added up over its replicas when somebody asks and never before."""

from collections.abc import Iterator
from typing import NamedTuple

from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool


class StageTotals(NamedTuple):
    """The requests of one head in one stage, and the replicas as it sees them. Any thread may make one.

    Attributes:
        stage_id: the stage.
        waiting: requests that no engine works on: not sent yet, or not begun as far as engines have reported.
        running: those that an engine works on.
        kv_usage: share of the KV memory of its replicas that is in use, 0 to 1; None while it has none.
        hit_ratio: see `StageFlow`.
        expected_wait: seconds until an engine would begin a request that came now: `waiting` over the rate at which
            requests leave the queue. 0 where none waits; None where some do and that rate is not known.
    """

    stage_id: int
    waiting: int
    running: int
    kv_usage: float | None
    hit_ratio: float | None
    expected_wait: float | None


def all_totals(orchestrator: Orchestrator) -> Iterator[StageTotals]:
    """Those of each stage. What waits before it is accepted counts for the first stage that it needs."""
    metrics, first = orchestrator.metrics, orchestrator.needed_pools[0]
    for pool in orchestrator.stage_pools:
        unsent = sum(metrics.waiting_in[pool.stage_id]())
        yield _totals(pool, unsent + (metrics.waiting if pool is first else 0))


def _totals(pool: StagePool, unsent: int) -> StageTotals:
    queued = [(member.account.waiting, len(member.in_flight)) for member in pool.members]
    waiting = unsent + sum(unbegun for unbegun, _ in queued)
    rate = pool.flow.leaving_rate
    return StageTotals(
        pool.stage_id,
        waiting,
        sum(max(0, in_flight - unbegun) for unbegun, in_flight in queued),
        _kv_usage(pool),
        pool.flow.hit_ratio,
        (waiting / rate if rate else None) if waiting else 0.0,
    )


def _kv_usage(pool: StagePool) -> float | None:
    """By the size of their memory, or each replica as much as any other where that is not known of all."""
    loads = [member.load for member in pool.members if member.client is not None]
    if not loads:
        return None
    weights = [load.kv_blocks for load in loads]
    if not all(weights):
        weights = [1] * len(loads)
    return sum(load.kv_usage * weight for load, weight in zip(loads, weights, strict=True)) / sum(weights)
