"""vLLM's loggers get engines that join, and drop engines that leave."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.contract.configs import vllm_config, write_model
from vllm_omni_plugin.integration.core_client import stat_labels
from vllm_omni_plugin.integration.core_client.stat_labels import StatLabels
from vllm_omni_plugin.orchestrator.pool.pool_member import engine_index

Sample = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    return vllm_config(write_model(tmp_path_factory.mktemp("model")), speculative_config=speculative)


@pytest.fixture(params=[False, True], ids=["per engine", "aggregated"])
def manager(config: Any, request: pytest.FixtureRequest) -> Iterator[StatLoggerManager]:
    manager = StatLoggerManager(config, [0, 1], aggregate_engine_logging=request.param)
    manager.log_engine_initialized()
    yield manager
    unregister_vllm_metrics()


def samples(engine: int | None = None) -> set[Sample]:
    """Names and labels of vLLM's samples, all or those of one engine, whose label is then left out."""
    return {
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if name != "engine"))
        if engine is not None
        else (sample.name, frozenset(sample.labels.items()))
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and (engine is None or sample.labels.get("engine") == str(engine))
    }


def value(name: str, engine: int, **labels: str) -> float | None:
    model = next(dict(labels)["model_name"] for _, labels in samples(0) | samples(1) if "model_name" in dict(labels))
    return REGISTRY.get_sample_value(name, {"engine": str(engine), "model_name": model, **labels})


def record(manager: StatLoggerManager, engine: int) -> None:
    iteration = IterationStats()
    iteration.finished_requests.append(FinishedRequestStats(FinishReason.STOP, "id"))
    speculation = SpecDecodingStats(num_spec_tokens=2, num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1)
    speculation.num_accepted_tokens_per_pos = [1, 0]
    report = SchedulerStats(num_running_reqs=3, spec_decoding_stats=speculation)
    manager.record(report, iteration, MultiModalCacheStats(), engine)


def test_a_replica_that_joins_has_all_samples_and_its_reports_are_recorded_and_logged(
    manager: StatLoggerManager, caplog: pytest.LogCaptureFixture
) -> None:
    StatLabels(manager).add(5)
    assert samples(5) == samples(0) != set()
    record(manager, 5)
    assert value("vllm:num_requests_running", 5) == 3
    assert value("vllm:request_success_total", 5, finished_reason="stop") == 1
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", 5, position="0") == 1
    assert value("vllm:num_requests_running", 0) == 0
    with caplog.at_level(logging.DEBUG, "vllm"):
        manager.log()
    assert "Unexpected engine_idx" not in caplog.text


def test_a_fleet_whose_first_replica_is_of_a_later_stage_takes_the_others(config: Any) -> None:
    manager = StatLoggerManager(config, [engine_index(1, 0)])
    manager.log_engine_initialized()
    try:
        labels = StatLabels(manager)
        for index in (engine_index(0, 0), engine_index(2, 1)):
            labels.add(index)
            record(manager, index)
        assert manager.engine_indexes == [10_000, 0, 20_001]
        assert samples(20_001) == samples(0) != set()
    finally:
        unregister_vllm_metrics()


def test_the_counts_of_a_replica_that_left_stay_and_its_gauges_go(manager: StatLoggerManager) -> None:
    labels = StatLabels(manager)
    before = samples()
    for count in range(1, 4):
        labels.add(5)
        record(manager, 5)
        manager.log()
        labels.remove(5)
        assert value("vllm:request_success_total", 5, finished_reason="stop") == count
        assert value("vllm:num_requests_running", 5) is None
    assert {name for name, _ in samples() - before} == {name for name, _ in samples(5)}
    assert manager.engine_indexes == [0, 1]


def test_a_replica_that_was_there_from_the_start_can_leave_and_come_back(manager: StatLoggerManager) -> None:
    labels = StatLabels(manager)
    before = samples()
    labels.remove(0)
    assert value("vllm:num_requests_running", 0) is None
    manager.record_sleep_state(0, 0)
    manager.log()
    labels.add(0)
    record(manager, 0)
    assert samples() >= before


def test_adding_and_removing_are_idempotent_and_the_last_engine_is_kept_until_another_joins(
    manager: StatLoggerManager,
) -> None:
    labels = StatLabels(manager)
    for index in (1, 5, 5):
        labels.add(index)
    assert manager.engine_indexes == [0, 1, 5]
    for index in (5, 5):
        labels.remove(index)
    assert manager.engine_indexes == [0, 1]
    for index in (0, 1):
        labels.remove(index)
    manager.log()
    labels.add(7)
    assert manager.engine_indexes == [7]
    assert value("vllm:num_requests_running", 1) is None
    labels.remove(7)
    labels.add(7)
    labels.add(8)
    assert manager.engine_indexes == [7, 8]


@pytest.fixture
def api_server(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Makes the loggers of one of several API server processes that count in the same files, by its number."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    used: list[Any] = []

    def start(pid: int) -> StatLoggerManager:
        unregister_vllm_metrics()
        used.append(values.MultiProcessValue(process_identifier=lambda: pid))
        monkeypatch.setattr(values, "ValueClass", used[-1])
        return StatLoggerManager(config, [0], client_count=2)

    yield start
    unregister_vllm_metrics()
    for value_class in used:
        value_class.close_all_files()


def scraped(name: str, engine: int) -> float | None:
    """What a scrape of any of several API servers shows."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    found = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and sample.labels["engine"] == str(engine)
    ]
    return found[0] if found else None


def test_of_several_api_servers_the_latest_report_of_an_engine_counts(
    api_server: Callable[[int], StatLoggerManager],
) -> None:
    first, second = api_server(1), api_server(2)
    record(first, 0)
    assert scraped("vllm:num_requests_running", 0) == 3
    second.record(SchedulerStats(num_running_reqs=1), None, None, 0)
    assert scraped("vllm:num_requests_running", 0) == 1


def test_replicas_come_and_go_in_several_api_servers_without_a_warning(
    api_server: Callable[[int], StatLoggerManager],
) -> None:
    manager = api_server(1)
    labels = StatLabels(manager)
    for _ in range(2):
        labels.add(5)
        record(manager, 5)
        labels.remove(5)
    assert manager.engine_indexes == [0]
    assert scraped("vllm:request_success_total", 5) == 2


def test_metrics_that_are_kept_in_another_way_are_an_error_in_the_log(
    manager: StatLoggerManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    StatLabels(manager)
    assert caplog.text == ""
    monkeypatch.setattr(stat_labels, "REGISTRY", CollectorRegistry())
    StatLabels(manager)
    assert "replicas that join later will be missing in vLLM's metrics" in caplog.text
