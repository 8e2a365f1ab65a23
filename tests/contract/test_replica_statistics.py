"""vLLM's metrics of each replica behind the Rust front end, where no AsyncLLM records them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    MultiModalCacheStats,
    PrefixCacheStats,
    SchedulerStats,
)
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.contract.configs import vllm_config, write_model
from tests.project.source_tree import ROOT
from vllm_omni_plugin.integration.rust_front_end.replica_statistics import REQUEST_METRICS, ReplicaStatistics
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    return vllm_config(write_model(tmp_path_factory.mktemp("model")), speculative_config=speculative)


@pytest.fixture
def asked() -> list[None]:
    """How often a recording was asked for."""
    return []


@pytest.fixture
def ledgers() -> dict[int, LoadLedger]:
    """Of all replicas, by engine index."""
    return {}


@pytest.fixture
def statistics(config: Any, ledgers: dict[int, LoadLedger], asked: list[None]) -> Iterator[ReplicaStatistics]:
    yield ReplicaStatistics(config, ledgers.items, lambda: asked.append(None))
    unregister_vllm_metrics()


def scraped(statistics: ReplicaStatistics, name: str) -> dict[int, float]:
    """The values of a metric by engine, after all reports have been recorded."""
    statistics.flush()
    return {
        int(sample.labels["engine"]): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == f"vllm:{name}"
    }


def report(running: int, hits: int = 0, **more: Any) -> SchedulerStats:
    return SchedulerStats(running, prefix_cache_stats=PrefixCacheStats(False, 1, 2 * hits, hits), **more)


def test_a_scrape_shows_the_last_level_and_the_sum_of_all_counts_of_each_replica(
    statistics: ReplicaStatistics,
) -> None:
    for index in (0, 10_001):
        statistics.joined(index)
    for running, hits in ((3, 4), (2, 1), (1, 0)):
        statistics.record(10_001, report(running, hits))
    assert scraped(statistics, "num_requests_running") == {0: 0, 10_001: 1}
    assert scraped(statistics, "prefix_cache_hits_total") == {0: 0, 10_001: 5}
    assert set(scraped(statistics, "cache_config_info")) == {0, 10_001}
    statistics.record(10_001, report(0, 7))
    assert scraped(statistics, "prefix_cache_hits_total")[10_001] == 12


def test_the_levels_of_a_replica_that_leaves_go_and_its_counts_stay(statistics: ReplicaStatistics) -> None:
    for index in (0, 1):
        statistics.joined(index)
        statistics.record(index, report(3, 1))
    statistics.flush()
    statistics.record(1, report(3, 1))
    statistics.left(1)
    assert scraped(statistics, "num_requests_running") == {0: 3}
    assert scraped(statistics, "prefix_cache_hits_total") == {0: 1, 1: 2}
    statistics.joined(1)
    statistics.record(1, report(5))
    assert scraped(statistics, "num_requests_running") == {0: 3, 1: 5}


def test_tokens_are_counted_by_replica_over_restarts_of_its_engine(
    statistics: ReplicaStatistics, ledgers: dict[int, LoadLedger]
) -> None:
    def counts() -> tuple[dict[int, float], dict[int, float]]:
        return scraped(statistics, "prompt_tokens_total"), scraped(statistics, "generation_tokens_total")

    for index in (0, 1):
        statistics.joined(index)
        ledgers[index] = LoadLedger()
    ledgers[1].prompted, ledgers[1].generated = 10, 3
    assert counts() == ({0: 0, 1: 10}, {0: 0, 1: 3})
    ledgers[1].generated = 5
    assert counts() == ({0: 0, 1: 10}, {0: 0, 1: 5})
    ledgers[1].generated = 6
    ledgers[1] = LoadLedger()
    ledgers[1].prompted = 20
    assert counts() == ({0: 0, 1: 30}, {0: 0, 1: 6})
    ledgers[1].generated = 1
    statistics.left(1)
    del ledgers[1]
    assert counts() == ({0: 0, 1: 30}, {0: 0, 1: 7})


def test_reports_that_cannot_be_added_are_recorded_one_by_one_and_soon(
    statistics: ReplicaStatistics, asked: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[int, int]] = []

    def record(_: Any, stats: SchedulerStats, *__: Any, engine_idx: int) -> None:
        recorded.append((stats.num_running_reqs, stats.prefix_cache_stats.hits))

    monkeypatch.setattr(StatLoggerManager, "record", record)
    statistics.joined(0)
    statistics.record(0, report(100, 1))
    for number in range(64):
        assert asked == []
        statistics.record(0, report(number, 1, kv_connector_stats={"transfers": 1}))
    assert asked == [None]
    statistics.record(0, report(200, 1))
    statistics.flush()
    # The first of them takes the counts of what came before.
    assert recorded == [(0, 2), *((number, 1) for number in range(1, 64)), (200, 1)]


def test_a_report_that_vllms_loggers_cannot_process_costs_only_itself(
    statistics: ReplicaStatistics, caplog: pytest.LogCaptureFixture
) -> None:
    for index in (0, 1):
        statistics.joined(index)
    statistics.record(0, SchedulerStats(num_running_reqs="many"))  # type: ignore[arg-type]
    statistics.record(1, report(4))
    assert scraped(statistics, "num_requests_running")[1] == 4
    assert "Statistics of engine 0 cannot be processed" in caplog.text


def test_metrics_of_requests_are_left_out_and_no_others(
    statistics: ReplicaStatistics, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    statistics.joined(0)
    statistics.flush()
    shown = metrics()
    unregister_vllm_metrics()
    manager = StatLoggerManager(config, [0], enable_default_loggers=False)
    manager.log_engine_initialized()
    every = metrics()
    assert every.keys() - shown.keys() == REQUEST_METRICS & every.keys()
    # Of metrics that need another configuration, there are `watermark_requests` only.
    assert every.keys() >= REQUEST_METRICS - {"vllm:watermark_requests"}
    speculation = SpecDecodingStats(2, 1, 2, 1, [1, 0], [1, 1])
    manager.record(report(1, 1, kv_cache_usage=0.5, spec_decoding_stats=speculation), None, None, 0)
    by_scheduler = metrics()
    assert not {name for name in every if every[name] != by_scheduler[name]} & REQUEST_METRICS
    iteration = IterationStats()
    iteration.num_generation_tokens = iteration.prompt_token_stats.total = iteration.num_preempted_reqs = 1
    iteration.finished_requests.append(FinishedRequestStats(FinishReason.STOP, "id", max_tokens_param=1))
    iteration.time_to_first_tokens_iter = iteration.inter_token_latencies_iter = [0.1]
    manager.record(None, iteration, MultiModalCacheStats(False, 1, 1, 1), 0)
    by_requests = metrics()
    changed = {name for name in every if by_requests[name] != by_scheduler[name]}
    assert changed - REQUEST_METRICS == {"vllm:generation_tokens", "vllm:prompt_tokens"}


def test_prometheus_drops_of_the_front_end_what_is_shown_by_replica(statistics: ReplicaStatistics) -> None:
    config = yaml.safe_load((ROOT / "examples" / "monitoring" / "prometheus.yml").read_text())
    _, of_front_ends = config["scrape_configs"]
    (rule,) = of_front_ends["metric_relabel_configs"]
    statistics.joined(0)
    statistics.flush()
    samples = {
        sample.name
        for family in REGISTRY.collect()
        for sample in family.samples
        if family.name.startswith("vllm:") and not sample.name.endswith("_created")
    }
    assert samples
    assert {name for name in samples if not re.fullmatch(rule["regex"], name)} == set()
    assert {name for name in REQUEST_METRICS if re.fullmatch(rule["regex"], name)} == set()


def metrics() -> dict[str, list[float]]:
    """The values of all of vLLM's metrics."""
    return {
        family.name: [sample.value for sample in family.samples if not sample.name.endswith("_created")]
        for family in REGISTRY.collect()
        if family.name.startswith("vllm:")
    }
