"""Reports of vLLM's schedulers are merged over replicas and over time, and none of their fields is forgotten."""

from copy import deepcopy
from dataclasses import fields
from typing import Any

import msgspec
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_omni_plugin.integration.rust_front_end.replica_statistics import FleetReports
from vllm_omni_plugin.vllm_api.engine_messages.scheduler_reports import (
    fleet_levels,
    fleet_report,
    has_single_values,
    with_earlier_counts,
)

LEVELS = {
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    "num_kv_fetch_reqs_by_stage",
    "kv_cache_usage",
    "waiting_lora_adapters",
    "running_lora_adapters",
}
COUNTS = {"prefix_cache_stats", "connector_prefix_cache_stats", "spec_decoding_stats"}
SINGLE = {"kv_cache_eviction_events", "kv_connector_stats", "ec_connector_stats", "perf_stats"}
OF_ITS_STEP = {"step_counter", "current_wave", "iteration_details", "cudagraph_stats"}
"""No metric is made of them."""


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def test_each_field_of_a_report_is_a_level_a_count_a_single_value_or_of_its_step() -> None:
    assert names(SchedulerStats) == LEVELS | COUNTS | SINGLE | OF_ITS_STEP
    assert names(PrefixCacheStats) == {
        "reset",
        "requests",
        "queries",
        "hits",
        "preempted_requests",
        "preempted_queries",
        "preempted_hits",
        "hits_by_source",
    }
    assert names(SpecDecodingStats) == {
        "num_spec_tokens",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "num_draft_tokens_per_pos",
    }


def cache(number: int, **more: Any) -> PrefixCacheStats:
    return PrefixCacheStats(False, number, 10 * number, 5 * number, number, 2 * number, number, **more)


def test_one_engine_stands_for_the_fleet_with_all_levels_and_its_own_counts() -> None:
    one = SchedulerStats(1, 2, 3, {"in_progress": 1}, kv_cache_usage=0.2, running_lora_adapters={"a": 1})
    two = SchedulerStats(
        10,
        20,
        30,
        {"in_progress": 2, "waiting_to_start": 1},
        step_counter=7,
        kv_cache_usage=0.6,
        prefix_cache_stats=cache(3),
        perf_stats=(perf := object()),  # type: ignore[arg-type]
        waiting_lora_adapters={"b": 1},
        running_lora_adapters={"a": 2},
    )
    before = deepcopy((one, two))
    merged = fleet_report(two, fleet_levels([one, two]))
    assert merged == SchedulerStats(
        11,
        22,
        33,
        {"in_progress": 3, "waiting_to_start": 1},
        step_counter=7,
        kv_cache_usage=0.4,
        prefix_cache_stats=cache(3),
        perf_stats=perf,  # type: ignore[arg-type]
        waiting_lora_adapters={"b": 1},
        running_lora_adapters={"a": 3},
    )
    assert (one, two.num_running_reqs, two.running_lora_adapters) == (before[0], 10, {"a": 2})


def test_a_report_that_lacks_fields_on_the_wire_has_them_all() -> None:
    # As Python stages send it. The Rust front end needs fields of which msgspec writes only those that were read.
    short = msgspec.msgpack.decode(msgspec.msgpack.encode({"num_running_reqs": 2}), type=SchedulerStats)
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(fleet_report(short, fleet_levels([short]))))
    assert whole == msgspec.to_builtins(SchedulerStats(num_running_reqs=2))


def test_counts_of_an_earlier_step_are_added_and_levels_are_those_of_the_later_one() -> None:
    def report(number: int) -> SchedulerStats:
        speculation = SpecDecodingStats(2, number, 2 * number, number, [number, 0], [number, number])
        counts = cache(number, hits_by_source={"device": number})
        return SchedulerStats(
            number,
            kv_cache_usage=number / 10,
            prefix_cache_stats=counts,
            connector_prefix_cache_stats=cache(number),
            spec_decoding_stats=speculation,
        )

    earlier, later = report(1), report(2)
    before = deepcopy((earlier, later))
    expected = report(3)
    expected.num_running_reqs, expected.kv_cache_usage = 2, 0.2
    assert with_earlier_counts(later, earlier) == expected
    assert (earlier, later) == before


def test_only_reports_whose_values_cannot_be_added_are_kept_whole() -> None:
    plain = SchedulerStats(5, prefix_cache_stats=cache(1), spec_decoding_stats=SpecDecodingStats(2, 1))
    assert not has_single_values(plain)
    for name in SINGLE:
        assert has_single_values(SchedulerStats(**{name: {"transfers": 1}}))


class Statistics:
    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.gone: list[int] = []

    def record(self, index: int, report: SchedulerStats) -> None:
        self.recorded.append(index)

    def left(self, index: int) -> None:
        self.gone.append(index)


def levels(running: int, hits: int, **single: Any) -> SchedulerStats:
    return SchedulerStats(running, prefix_cache_stats=PrefixCacheStats(False, 1, 10, hits), **single)


def test_counts_are_added_up_and_single_values_go_alone_all_with_the_last_levels_of_each_replica() -> None:
    statistics: Any = Statistics()
    reports = FleetReports(statistics)
    batch = [(0, levels(1, 1)), (1, levels(5, 2, kv_connector_stats={"transfers": 1})), (0, levels(2, 4))]
    kept = list(reports.keep(batch))
    assert [(each.num_running_reqs, each.prefix_cache_stats.hits) for each in kept] == [(7, 2), (7, 5)]
    assert statistics.recorded == [0, 1, 0]
    reports.left(1)
    assert [each.num_running_reqs for each in reports.keep([(0, levels(3, 0))])] == [3]
    assert statistics.gone == [1]
