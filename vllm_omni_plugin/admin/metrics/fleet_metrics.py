"""Computes the Prometheus metrics from the orchestrator's state at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_omni_plugin.admin.metrics.catalogue import BY_NAME, PREFIX
from vllm_omni_plugin.admission import Admission
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator import Orchestrator, PoolMember, StagePool
from vllm_omni_plugin.orchestrator.pool.pool_member import OTHER_GENERATION
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics


def stage_numbers(orchestrator: Orchestrator) -> Iterator[tuple[int, dict[str, float | None]]]:
    """The id of each stage, and this head's numbers there by metric; None: unknown, or no replica. Any thread may call.

    Requests that wait before they are accepted count for the first stage they need.
    """
    metrics, first = orchestrator.metrics, orchestrator.needed_pools[0]
    for pool in orchestrator.stage_pools:
        queued = [(member.ledger.waiting, len(member.in_flight)) for member in pool.members]
        waiting = sum(metrics.waiting_in[pool.stage_id]()) + sum(unbegun for unbegun, _ in queued)
        waiting += metrics.held_before_accept if pool is first else 0
        rate = pool.flow.leaving_rate
        yield (
            pool.stage_id,
            {
                "requests_waiting": waiting,
                "requests_running": sum(max(0, in_flight - unbegun) for unbegun, in_flight in queued),
                "expected_wait_seconds": (waiting / rate if rate else None) if waiting else 0.0,
                "stage_kv_cache_usage_ratio": _kv_usage(pool),
                "prefix_cache_hit_ratio": pool.flow.hit_ratio,
            },
        )


def _kv_usage(pool: StagePool) -> float | None:
    """The mean weighted by memory size; unweighted if a size is unknown."""
    loads = [member.ledger.uncached_load() for member in pool.members if member.client is not None]
    if not loads:
        return None
    weights = [load.kv_blocks for load in loads]
    if not all(weights):
        weights = [1] * len(loads)
    return sum(load.kv_usage * weight for load, weight in zip(loads, weights, strict=True)) / sum(weights)


_OTHERS = "other"
"""Labels of all other tenants, and of requests without a tenant. A tenant of this name gets a suffix."""
Samples = Iterable[tuple[tuple[object, ...], float]]
"""Pairs of label values and a number."""

_BY_REPLICA: tuple[tuple[str, Callable[[PoolMember], float]], ...] = (
    ("requests_in_flight", lambda member: len(member.in_flight)),
    # Without the load of other heads, which report it themselves.
    ("prefill_tokens", lambda member: member.ledger.own.prefill_tokens),
    ("decode_tokens", lambda member: member.ledger.uncached_load().decode_tokens),
    ("kv_cache_usage_ratio", lambda member: member.ledger.uncached_load().kv_usage),
)


class FleetCollector(Collector):
    """Reads counts that the orchestrator's thread writes. Each is one number, so a scrape needs no lock."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def describe(self) -> Iterable[Metric]:
        """Empty: the prefix makes names unique, and a registry would otherwise scrape to learn them."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._replicas()
        of_stages = list(stage_numbers(self._orchestrator))
        for name in of_stages[0][1]:
            numbers = [((stage_id,), numbers[name]) for stage_id, numbers in of_stages]
            yield _family(name, [(labels, number) for labels, number in numbers if number is not None])
        yield from self._heads()
        if self._orchestrator.admission is not None:
            for name, labelled in _admission(self._orchestrator.admission):
                yield _family(name, labelled)
        metrics = self._orchestrator.metrics
        for name, samples in _counts(metrics):
            yield _family(name, samples)
        for histogram in (metrics.queue_time_seconds, metrics.hold_time_seconds, metrics.stage_seconds):
            yield from histogram.collect()

    def _replicas(self) -> Iterator[Metric]:
        pools = self._orchestrator.stage_pools
        members = [member for pool in pools for member in pool.members]
        states = Counter((member.stage_id, member.state) for member in members)
        shown = [*(status.value for status in ReplicaStatus), OTHER_GENERATION]
        by_state = [((pool.stage_id, state), states[pool.stage_id, state]) for pool in pools for state in shown]
        yield _family("replicas", by_state)
        infos = [((each.stage_id, each.replica_id, each.engine_index), each.client is not None) for each in members]
        yield _family("replica_info", infos)
        departed = {(pool.stage_id, id_): counts for pool in pools for id_, counts in pool.departed.items()}
        # Read again: a replica may have come or left since, and no sum may fall.
        members += [member for pool in pools for member in pool.members]
        present = {(member.stage_id, member.replica_id): member.counts for member in members}
        by_position = ("assignments", "dispatches"), ("replica_restarts",), ("replica_stalls",), ("adapter_loads",)
        for position, names in enumerate(by_position):
            for name in names:
                yield _family(name, [(labels, counts[position]) for labels, counts in (departed | present).items()])
        for name, value in _BY_REPLICA:
            gauges = {(member.stage_id, member.replica_id): value(member) for pool in pools for member in pool.members}
            yield _family(name, gauges.items())

    def _heads(self) -> Iterator[Metric]:
        connected = self._orchestrator.metrics.coordinator_connected
        if connected is not None:
            yield _family("coordinator_connected", [((), connected)])
        exchange = self._orchestrator.stage_pools[0].exchange
        if exchange is not None:
            yield _family("heads", [((), exchange.heads)])


def _admission(admission: Admission) -> Iterator[tuple[str, Samples]]:
    """Samples by class and tenant; tenants not in the admission file are summed up under one label."""
    by_class = admission.backlog_by_class()
    yield "requests_queued", [((name,), backlog.requests) for name, backlog in by_class.items()]
    waits = admission.expected_waits()
    yield "class_expected_wait_seconds", [((name,), wait) for name, wait in waits.items()]
    named, other = admission.tenant_reports()
    tenants = {_label(name): report for name, report in named.items()} | {_OTHERS: other}
    yield "tenant_requests_waiting", [((name,), each.waiting.requests) for name, each in tenants.items()]
    yield "tenant_requests_in_flight", [((name,), each.in_flight) for name, each in tenants.items()]
    yield "tenant_tokens", [((name,), each.served_tokens) for name, each in tenants.items()]
    yield "tenant_weight", [((name,), each.weight) for name, each in tenants.items() if name != _OTHERS]


def _label(tenant: str) -> str:
    # Also of one that has such a suffix already, or two tenants would have one label.
    return f"{tenant}_" if tenant.rstrip("_") == _OTHERS else tenant


def _counts(metrics: OrchestratorMetrics) -> Iterator[tuple[str, Samples]]:
    held = {
        "http": metrics.held_before_accept,
        "fleet": metrics.held,
        "move": metrics.moves_waiting,
        "paused": metrics.paused,
    }
    yield "requests_held", [((where,), count) for where, count in held.items()]
    yield "request_moves", [((way.value,), count) for way, count in metrics.request_moves.items()]
    failed = metrics.requests_failed.copy()
    failed["no_replica"] += metrics.requests_failed_before_accept
    yield "requests_failed", [((reason,), count) for reason, count in failed.items()]
    # Copies, since the orchestrator's thread may add a key meanwhile.
    refused = Counter(metrics.requests_refused.copy()) + Counter(metrics.requests_refused_before_accept)
    yield "requests_refused", refused.items()
    yield "decisions", metrics.decisions.copy().items()
    yield "decision_fallbacks", metrics.decision_fallbacks.copy().items()
    for name, count in (
        ("idle_while_waiting", metrics.idle_while_waiting),
        ("tokens_swallowed", metrics.tokens_swallowed),
        ("replays_diverged", metrics.replays_diverged),
        ("matched_tokens", metrics.matched_tokens),
        ("cached_tokens", metrics.cached_tokens),
    ):
        yield name, [((), count)]


def _family(name: str, samples: Samples) -> Metric:
    text = BY_NAME[name]
    kind = CounterMetricFamily if text.kind == "counter" else GaugeMetricFamily
    family: Any = kind(f"{PREFIX}{name}", text.meaning, labels=text.labels)
    for values, number in samples:
        family.add_metric(tuple(map(str, values)), number)
    return family  # type: ignore[no-any-return]
