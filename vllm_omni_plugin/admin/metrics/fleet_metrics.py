"""Our Prometheus metrics, computed from the orchestrator's state when they are scraped and never before."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
Samples = Iterable[tuple[tuple[object, ...], float]]
"""Values of labels, and a number."""


_BY_REPLICA: tuple[tuple[Family, str, str, Callable[[PoolMember], float]], ...] = (
    (CounterMetricFamily, "dispatches", "Requests sent to a replica.", lambda member: member.dispatched),
    (
        CounterMetricFamily,
        "replica_restarts",
        "Attempts to start a lost replica again.",
        lambda member: member.restarts,
    ),
    (
        GaugeMetricFamily,
        "requests_in_flight",
        "Requests a replica is charged with.",
        lambda member: len(member.in_flight),
    ),
    (
        GaugeMetricFamily,
        "prefill_tokens",
        "Prompt tokens that a replica still has to compute.",
        # What other heads have there is in the load, and they tell it themselves.
        lambda member: member.account.own.prefill_tokens,
    ),
    (
        GaugeMetricFamily,
        "decode_tokens",
        "Tokens of requests that a replica is producing output for.",
        lambda member: member.load.decode_tokens,
    ),
    (
        GaugeMetricFamily,
        "kv_cache_usage_ratio",
        "Share of KV memory in use, as a replica reported.",
        lambda member: member.load.kv_usage,
    ),
)


class FleetCollector(Collector):
    """Reads counts that the orchestrator's thread writes; each is one number, so a scrape needs no lock."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: names are unique by their prefix, and asking for them would take a scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metric families, with one sample per stage or replica."""
        metrics, pools = self._orchestrator.metrics, self._orchestrator.stage_pools
        members = [member for pool in pools for member in pool.members]
        states = Counter((member.stage_id, member.status) for member in members)
        by_state = [
            ((pool.stage_id, status.value), states[pool.stage_id, status]) for pool in pools for status in ReplicaStatus
        ]
        yield _family(GaugeMetricFamily, "replicas", "Replicas by state.", ("stage", "state"), by_state)
        for kind, name, documentation, value in _BY_REPLICA:
            samples = [((member.stage_id, member.replica_id), value(member)) for member in members]
            yield _family(kind, name, documentation, ("stage", "replica"), samples)
        yield from self._heads()
        yield _family(
            GaugeMetricFamily,
            "requests_held",
            "Requests that wait because no replica can serve: before they are accepted (http) or after (fleet); with "
            "their replica lost, for their turn to move (move); or for the end of a pause (paused).",
            ("where",),
            [
                (("http",), metrics.waiting),
                (("fleet",), metrics.held),
                (("move",), metrics.moves_waiting),
                (("paused",), metrics.paused),
            ],
        )
        for name, documentation, labels, counts in _counters(metrics):
            yield _family(CounterMetricFamily, name, documentation, labels, counts)
        for histogram in (metrics.queue_time, metrics.hold_time, metrics.stage_seconds):
            yield from histogram.collect()

    def _heads(self) -> Iterator[Metric]:
        has_session, exchange = self._orchestrator.metrics.has_session, self._orchestrator.stage_pools[0].exchange
        if has_session is not None:
            yield _gauge("coordinator_connected", "Whether the coordinator answers this head: 1 or 0.", has_session)
        if exchange is not None:
            yield _gauge("heads", "Heads of the fleet that this one hears of, and itself.", exchange.heads)


def _counters(metrics: OrchestratorMetrics) -> Iterator[tuple[str, str, tuple[str, ...], Samples]]:
    by_policy = ("stage", "policy")
    # The orchestrator's thread may add a key meanwhile: hence the copies.
    moves = [((way.value,), count) for way, count in metrics.moves_by_way.items()]
    yield (
        "request_moves",
        "Requests sent again to another replica because theirs was lost, by how they went on there.",
        ("way",),
        moves,
    )
    failed: Samples = [
        (("replica_lost",), metrics.lost),
        (("query_of_death",), metrics.queries_of_death),
        (("no_replica",), metrics.refused + metrics.turned_away),
    ]
    yield "requests_failed", "Requests that ended with an error of the fleet.", ("reason",), failed
    reasons, fallbacks = metrics.decisions.copy().items(), metrics.fallbacks.copy().items()
    yield "decisions", "Dispatches by what decided on the replica.", (*by_policy, "reason"), reasons
    less = "Dispatches by why the policy decided by something less than its rule."
    yield "decision_fallbacks", less, (*by_policy, "fallback"), fallbacks
    for name, documentation, count in (
        ("tokens_swallowed", "Tokens that replays repeated and no client got twice.", metrics.swallowed_tokens),
        ("replays_diverged", "Replays that did not repeat what had been delivered.", metrics.diverged),
        ("matched_tokens", "Prompt tokens that the policy expected to be cached.", metrics.matched_tokens),
        ("cached_tokens", "Prompt tokens that engines took from their caches.", metrics.cached_tokens),
    ):
        yield name, documentation, (), [((), count)]


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return _family(GaugeMetricFamily, name, documentation, (), [((), value)])


def _family(kind: Family, name: str, documentation: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family: Any = kind(f"vllm_omni_fleet:{name}", documentation, labels=labels)
    for values, number in samples:
        family.add_metric(tuple(map(str, values)), number)
    return family  # type: ignore[no-any-return]
