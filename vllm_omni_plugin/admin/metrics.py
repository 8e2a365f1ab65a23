"""Our Prometheus metrics, computed from the orchestrator's state when they are scraped and never before."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.metrics import Histogram
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember

_PER_REPLICA = ("stage", "replica")


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
        members = [member for pool in self._orchestrator.stage_pools for member in pool.members]
        yield self._replicas_by_state()
        yield _dispatches(members)
        yield _in_flight(members)
        yield _restarts(members)
        metrics = self._orchestrator.metrics
        yield _queue_time(metrics.queue_time)
        yield CounterMetricFamily(
            "vllm_omni:request_moves", "Requests sent again to another replica because theirs was lost.", metrics.moves
        )
        failed = CounterMetricFamily(
            "vllm_omni:requests_failed", "Requests that ended with an error of the fleet.", labels=("reason",)
        )
        failed.add_metric(("replica_lost",), metrics.lost)
        failed.add_metric(("no_replica",), metrics.refused + metrics.turned_away)
        yield failed

    def _replicas_by_state(self) -> Metric:
        family = GaugeMetricFamily("vllm_omni:replicas", "Replicas by state.", labels=("stage", "state"))
        for pool in self._orchestrator.stage_pools:
            states = Counter(member.status for member in pool.members)
            for status in ReplicaStatus:
                family.add_metric((str(pool.stage_id), status.value), states[status])
        return family


def _labels(member: PoolMember) -> tuple[str, str]:
    return str(member.stage_id), str(member.replica_id)


def _dispatches(members: list[PoolMember]) -> Metric:
    family = CounterMetricFamily("vllm_omni:dispatches", "Requests sent to a replica.", labels=_PER_REPLICA)
    for member in members:
        family.add_metric(_labels(member), member.dispatched)
    return family


def _in_flight(members: list[PoolMember]) -> Metric:
    family = GaugeMetricFamily(
        "vllm_omni:requests_in_flight", "Requests a replica is charged with.", labels=_PER_REPLICA
    )
    for member in members:
        family.add_metric(_labels(member), member.queue_length)
    return family


def _restarts(members: list[PoolMember]) -> Metric:
    family = CounterMetricFamily(
        "vllm_omni:replica_restarts", "Attempts to start a lost replica again.", labels=_PER_REPLICA
    )
    for member in members:
        family.add_metric(_labels(member), member.restarts)
    return family


def _queue_time(histogram: Histogram) -> Metric:
    counts = list(histogram.counts)
    bounds = [*map(str, histogram.upper_bounds), "+Inf"]
    cumulative = [(bound, float(sum(counts[: index + 1]))) for index, bound in enumerate(bounds)]
    return HistogramMetricFamily(
        "vllm_omni:queue_time_seconds",
        "Seconds between the arrival of a request at the orchestrator and its dispatch.",
        buckets=cumulative,
        sum_value=histogram.sum,
    )
