"""A front end that takes the fleet for one engine gets the levels of all replicas, and each count once."""

from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from vllm_omni_plugin.integration.rust_front_end.replica_statistics import FleetReports


class Statistics:
    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.gone: list[int] = []

    def record(self, index: int, report: SchedulerStats) -> None:
        self.recorded.append(index)

    def left(self, index: int) -> None:
        self.gone.append(index)


def report(running: int, hits: int, **single: Any) -> SchedulerStats:
    return SchedulerStats(running, prefix_cache_stats=PrefixCacheStats(False, 1, 10, hits), **single)


def test_counts_are_added_up_and_single_values_go_alone_all_with_the_last_levels_of_each_replica() -> None:
    statistics: Any = Statistics()
    reports = FleetReports(statistics)
    batch = [(0, report(1, 1)), (1, report(5, 2, kv_connector_stats={"transfers": 1})), (0, report(2, 4))]
    kept = list(reports.keep(batch))
    assert [(each.num_running_reqs, each.prefix_cache_stats.hits) for each in kept] == [(7, 2), (7, 5)]
    assert statistics.recorded == [0, 1, 0]
    reports.left(1)
    assert [each.num_running_reqs for each in reports.keep([(0, report(3, 0))])] == [3]
    assert statistics.gone == [1]
