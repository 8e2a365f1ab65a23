"""Our Prometheus metrics, computed from the orchestrator's state when they are scraped and never before."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.metrics import Histogram, OrchestratorMetrics
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator


class FleetCollector(Collector):
    """Reads counts that the orchestrator's thread writes; each is one number, so a scrape needs no lock.

    Args:
        orchestrator: what to report on.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: names are unique by their prefix, and asking for them would take a scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metric families, with one sample per stage or replica."""
        metrics = self._orchestrator.metrics
        yield self._replicas_by_state()
        yield from self._per_replica()
        yield from self._loads()
        yield from self._peers()
        yield _histogram(
            "vllm_omni_fleet:queue_time_seconds",
            "Seconds between the arrival of a request at the orchestrator and its first dispatch.",
            metrics.queue_time,
        )
        yield _histogram(
            "vllm_omni_fleet:hold_time_seconds",
            "Seconds that accepted requests waited because no replica could serve.",
            metrics.hold_time,
        )
        yield _stage_seconds(metrics)
        yield _held(metrics)
        yield from _moves(metrics)
        yield _failed(metrics)
        yield from _decisions(metrics)

    def _replicas_by_state(self) -> Metric:
        family = GaugeMetricFamily("vllm_omni_fleet:replicas", "Replicas by state.", labels=("stage", "state"))
        for pool in self._orchestrator.stage_pools:
            states = Counter(member.status for member in pool.members)
            for status in ReplicaStatus:
                family.add_metric((str(pool.stage_id), status.value), states[status])
        return family

    def _per_replica(self) -> Iterable[Metric]:
        labels = ("stage", "replica")
        dispatches = CounterMetricFamily("vllm_omni_fleet:dispatches", "Requests sent to a replica.", labels=labels)
        in_flight = GaugeMetricFamily(
            "vllm_omni_fleet:requests_in_flight", "Requests a replica is charged with.", labels=labels
        )
        restarts = CounterMetricFamily(
            "vllm_omni_fleet:replica_restarts", "Attempts to start a lost replica again.", labels=labels
        )
        for pool in self._orchestrator.stage_pools:
            for member in pool.members:
                names = (str(member.stage_id), str(member.replica_id))
                dispatches.add_metric(names, member.dispatched)
                in_flight.add_metric(names, len(member.in_flight))
                restarts.add_metric(names, member.restarts)
        return dispatches, in_flight, restarts

    def _loads(self) -> Iterable[Metric]:
        labels = ("stage", "replica")
        prefill = GaugeMetricFamily(
            "vllm_omni_fleet:prefill_tokens", "Prompt tokens that a replica still has to compute.", labels=labels
        )
        decode = GaugeMetricFamily(
            "vllm_omni_fleet:decode_tokens", "Tokens of requests that a replica is producing output for.", labels=labels
        )
        kv_usage = GaugeMetricFamily(
            "vllm_omni_fleet:kv_cache_usage_ratio", "Share of KV memory in use, as a replica reported.", labels=labels
        )
        for pool in self._orchestrator.stage_pools:
            for member in pool.members:
                names, load = (str(member.stage_id), str(member.replica_id)), member.load
                # What other heads have there is in the load, and they tell it themselves.
                prefill.add_metric(names, member.account.own.prefill_tokens)
                decode.add_metric(names, load.decode_tokens)
                kv_usage.add_metric(names, load.kv_usage)
        return prefill, decode, kv_usage

    def _peers(self) -> Iterator[Metric]:
        has_seat, exchange = self._orchestrator.metrics.has_seat, self._orchestrator.exchange
        if has_seat is not None:
            yield GaugeMetricFamily(
                "vllm_omni_fleet:coordinator_connected", "Whether the coordinator answers this head: 1 or 0.", has_seat
            )
        if exchange is not None:
            yield GaugeMetricFamily(
                "vllm_omni_fleet:heads", "Heads of the fleet that this one hears of, and itself.", exchange.heads
            )


def _held(metrics: OrchestratorMetrics) -> Metric:
    family = GaugeMetricFamily(
        "vllm_omni_fleet:requests_held",
        "Requests that wait because no replica can serve: before they are accepted (http) or after (fleet); or, with "
        "their replica lost, for their turn to move (move).",
        labels=("where",),
    )
    family.add_metric(("http",), metrics.waiting)
    family.add_metric(("fleet",), metrics.held)
    family.add_metric(("move",), metrics.moves_waiting)
    return family


def _moves(metrics: OrchestratorMetrics) -> Iterator[Metric]:
    moves = CounterMetricFamily(
        "vllm_omni_fleet:request_moves",
        "Requests sent again to another replica because theirs was lost, by how they went on there.",
        labels=("way",),
    )
    for way, count in metrics.moves_by_way.items():
        moves.add_metric((way.value,), count)
    yield moves
    yield CounterMetricFamily(
        "vllm_omni_fleet:tokens_swallowed",
        "Tokens that replays repeated and no client got twice.",
        metrics.swallowed_tokens,
    )
    yield CounterMetricFamily(
        "vllm_omni_fleet:replays_diverged", "Replays that did not repeat what had been delivered.", metrics.diverged
    )


def _failed(metrics: OrchestratorMetrics) -> Metric:
    family = CounterMetricFamily(
        "vllm_omni_fleet:requests_failed", "Requests that ended with an error of the fleet.", labels=("reason",)
    )
    family.add_metric(("replica_lost",), metrics.lost)
    family.add_metric(("query_of_death",), metrics.queries_of_death)
    family.add_metric(("no_replica",), metrics.refused + metrics.turned_away)
    return family


def _decisions(metrics: OrchestratorMetrics) -> Iterator[Metric]:
    yield _by_policy(
        "vllm_omni_fleet:decisions", "Dispatches by what decided on the replica.", "reason", metrics.decisions
    )
    yield _by_policy(
        "vllm_omni_fleet:decision_fallbacks",
        "Dispatches by why the policy decided by something less than its rule.",
        "fallback",
        metrics.fallbacks,
    )
    yield CounterMetricFamily(
        "vllm_omni_fleet:matched_tokens", "Prompt tokens that the policy expected to be cached.", metrics.matched_tokens
    )
    yield CounterMetricFamily(
        "vllm_omni_fleet:cached_tokens", "Prompt tokens that engines took from their caches.", metrics.cached_tokens
    )


def _by_policy(name: str, documentation: str, why: str, counts: dict[tuple[int, str, str], int]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=("stage", "policy", why))
    # The orchestrator's thread may add a key meanwhile.
    for (stage_id, policy, reason), count in counts.copy().items():
        family.add_metric((str(stage_id), policy, reason), count)
    return family


def _stage_seconds(metrics: OrchestratorMetrics) -> Metric:
    family = HistogramMetricFamily(
        "vllm_omni_fleet:stage_seconds",
        "Seconds that requests spent in the stages of a pipeline.",
        labels=("stage", "name", "part"),
    )
    for (stage_id, name, part), histogram in metrics.stage_seconds.items():
        family.add_metric((str(stage_id), name, part), _buckets(histogram), histogram.sum)
    return family


def _histogram(name: str, documentation: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, documentation, buckets=_buckets(histogram), sum_value=histogram.sum)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    counts = list(histogram.counts)
    bounds = [*map(str, histogram.upper_bounds), "+Inf"]
    return [(bound, float(sum(counts[: index + 1]))) for index, bound in enumerate(bounds)]
