"""The metrics of several API server processes in one scrape."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.metrics.fleet_metrics import FleetCollector
from vllm_omni_plugin.admin.metrics.multiprocess_metrics import MetricFiles

NEVER_S = 1000.0


class Told(Collector):
    """A collector with given values."""

    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> Iterator[Metric]:
        yield from self.families


Process = Callable[..., MetricFiles]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Writes the files of one process."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    made: list[tuple[MetricFiles, Any]] = []

    def start(pid: int, collector: Collector, interval: float = NEVER_S) -> MetricFiles:
        value_class = values.MultiProcessValue(process_identifier=lambda: pid)
        monkeypatch.setattr(values, "ValueClass", value_class)
        files = MetricFiles(collector, interval)
        files.write()
        made.append((files, value_class))
        return files

    yield start
    for files, value_class in made:
        files.close()
        value_class.close_all_files()


def scrape() -> dict[str, dict[str, float]]:
    """Values of a scrape by name and labels."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    shown: dict[str, dict[str, float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            shown.setdefault(sample.name, {})[",".join(sample.labels.values())] = sample.value
    return shown


def gauge(name: str, kind: Any = GaugeMetricFamily, **by_replica: float) -> Any:
    family = kind(name, "Help.", labels=("replica",))
    for replica, value in by_replica.items():
        family.add_metric((replica,), value)
    return family


counter = partial(gauge, kind=CounterMetricFamily)


def test_own_counts_are_summed_and_shared_values_are_not(process: Process) -> None:
    for pid in (1, 2):
        process(
            pid,
            Told(
                counter("vllm_omni_fleet:assignments", r0=pid),
                gauge("vllm_omni_fleet:requests_in_flight", r0=10 * pid),
                gauge("vllm_omni_fleet:replicas", up=3),
                gauge("vllm_omni_fleet:kv_cache_usage_ratio", r0=0.1 * pid),
            ),
        )
    assert scrape() == {
        "vllm_omni_fleet:assignments_total": {"r0": 3},
        "vllm_omni_fleet:requests_in_flight": {"r0": 30},
        "vllm_omni_fleet:replicas": {"up": 3},
        "vllm_omni_fleet:kv_cache_usage_ratio": {"r0": 0.2},
    }


def test_a_process_with_a_reused_number_continues_the_counters(process: Process) -> None:
    for count in (5, 1):
        process(1, Told(counter("vllm_omni_fleet:assignments", r0=count)))
    assert scrape() == {"vllm_omni_fleet:assignments_total": {"r0": 6}}


def test_a_counter_that_is_away_for_a_while_goes_on_and_a_gauge_is_0_meanwhile(process: Process) -> None:
    # As that of a tenant that leaves the admission file and comes back.
    collector = Told()
    files = process(1, collector)
    seen = []
    for families in ((5,), (), (7,)):
        collector.families = tuple(
            family
            for count in families
            for family in (counter("vllm_omni_fleet:tenant_tokens", a=count), gauge("vllm_omni_fleet:heads", a=count))
        )
        files.write()
        shown = scrape()
        seen.append((shown["vllm_omni_fleet:tenant_tokens_total"]["a"], shown["vllm_omni_fleet:heads"]["a"]))
    assert seen == [(5, 5), (5, 0), (7, 7)]


async def test_files_are_written_repeatedly_also_after_a_failure(process: Process) -> None:
    class Failing(Told):
        asked = 0

        def collect(self) -> Iterator[Metric]:
            self.asked += bool(self.families)
            if self.asked == 1:
                raise RuntimeError("a replica came meanwhile")
            return super().collect()

    collector = Failing()
    process(1, collector, interval=0.01)
    collector.families = (gauge("vllm_omni_fleet:requests_in_flight", r0=7),)
    # Once it is asked for a third time, all that it said the second time is written. A file that is just being made
    # cannot be read by prometheus_client.
    await eventually(lambda: collector.asked >= 3)
    assert scrape() == {"vllm_omni_fleet:requests_in_flight": {"r0": 7}}


async def test_all_families_are_written(process: Process) -> None:
    # Later counts go into files.
    process(os.getpid(), Told())
    async with FakeFleet(replicas=2) as fleet:
        await fleet.submit("a")
        fleet.orchestrator.metrics.observe_stage(0, "talker", "run", 1.0)
        collector = FleetCollector(fleet.orchestrator)
        process(os.getpid(), collector)
        samples = {sample.name for family in collector.collect() for sample in family.samples}
        assert set(scrape()) == {name for name in samples if not name.endswith("_created")}
        assert scrape()["vllm_omni_fleet:queue_time_seconds_count"] == {"": 1}
        assert sum(scrape()["vllm_omni_fleet:requests_in_flight"].values()) == 1
