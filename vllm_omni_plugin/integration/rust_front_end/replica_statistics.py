"""vLLM's own metrics of each replica: those of schedulers, from their reports, and the numbers of tokens.

Behind the Rust front end no AsyncLLM records them. Metrics of requests (time to first token, ...) are the front end's.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_omni_plugin.integration.core_client.output_guard import guard_statistics
from vllm_omni_plugin.integration.core_client.stat_labels import StatLabels
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.vllm_api.engine_messages.scheduler_reports import (
    fleet_levels,
    fleet_report,
    has_single_values,
    with_earlier_counts,
)

REQUEST_METRICS = frozenset(
    f"vllm:{name}"
    for name in (
        "admission_rejections",
        "corrupted_requests",
        "e2e_request_latency_seconds",
        "engine_sleep_state",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "mm_cache_hits",
        "mm_cache_queries",
        "num_preemptions",
        "prompt_tokens_by_source",
        "prompt_tokens_cached",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_num_preemptions",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_kv_computed_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "time_to_first_token_seconds",
        "watermark_requests",
    )
)
"""Metrics of vLLM's logger that are not set here. They are left out: they would be 0 for every replica."""

_MAX_WHOLE = 64
"""Reports that are kept whole until they must be recorded."""


class ReplicaStatistics:
    """Takes the reports of all replicas, and records them in vLLM's metrics when they are looked at.

    Recording a report takes as long as handing on some outputs. So the counts of a replica are only added up, and
    recorded at the next scrape. A report with values that cannot be added is kept whole; 64 of them make `record_soon`
    be called.

    `record`, `joined` and `left` are called on the orchestrator's thread, `flush` on another one.

    Args:
        vllm_config: of the server. It must have the sizes of the first ready response when a first replica has joined.
        ledgers: of all replicas, by engine index. Called by `flush`.
        record_soon: is called on the orchestrator's thread, and must make the other thread call `flush`.
        enabled: else reports are dropped, and vLLM has no metrics, as behind its Python server; they would be 0.
    """

    def __init__(
        self,
        vllm_config: Any,
        ledgers: Callable[[], Iterable[tuple[int, LoadLedger]]],
        record_soon: Callable[[], None],
        enabled: bool = True,
    ) -> None:
        self._config = vllm_config
        self._ledgers = ledgers
        self._record_soon = record_soon
        self._enabled = enabled
        self._lock = threading.Lock()
        self._serving: set[int] = set()
        self._whole: list[tuple[int, SchedulerStats]] = []
        self._sums: dict[int, SchedulerStats] = {}
        self._manager: StatLoggerManager | None = None
        self._labels: StatLabels | None = None
        self._labelled: set[int] = set()
        self._counted: dict[int, _Counted] = {}

    def joined(self, engine_index: int) -> None:
        with self._lock:
            self._serving.add(engine_index)

    def left(self, engine_index: int) -> None:
        """This replica serves no longer. Its counts stay; its levels go."""
        with self._lock:
            self._serving.discard(engine_index)

    def record(self, engine_index: int, report: SchedulerStats) -> None:
        """Take a report, which is not changed. Costs microseconds."""
        with self._lock:
            earlier = self._sums.get(engine_index)
            report = report if earlier is None else with_earlier_counts(report, earlier)
            if not has_single_values(report):
                self._sums[engine_index] = report
                return
            self._sums.pop(engine_index, None)
            self._whole.append((engine_index, report))
            is_full = len(self._whole) == _MAX_WHOLE
        if is_full:
            self._record_soon()

    def flush(self) -> None:
        """Record everything that has been taken, and the tokens since the last call."""
        with self._lock:
            serving, whole, sums = set(self._serving), self._whole, self._sums
            self._whole, self._sums = [], {}
        if not self._enabled:
            return
        tokens = self._count_tokens()
        for index in sorted(serving | {index for index, _ in whole} | sums.keys() | tokens.keys()):
            self._label(index)
        for index, report in chain(whole, sums.items()):
            assert self._manager is not None
            self._manager.record(report, None, engine_idx=index)
        for index, iteration in tokens.items():
            assert self._manager is not None
            self._manager.record(None, iteration, engine_idx=index)
        for index in sorted(self._labelled - serving):
            assert self._labels is not None
            self._labels.remove(index)
        self._labelled &= serving

    def _count_tokens(self) -> dict[int, IterationStats]:
        """The tokens since the last call, by engine index, without replicas that had none."""
        ledgers = dict(self._ledgers())
        ended = [
            (index, counted) for index, counted in self._counted.items() if ledgers.get(index) is not counted.ledger
        ]
        counts = [(index, counted.take()) for index, counted in ended]
        for index, _ in ended:
            del self._counted[index]
        for index, ledger in ledgers.items():
            counts.append((index, self._counted.setdefault(index, _Counted(ledger)).take()))
        found: dict[int, IterationStats] = {}
        for index, (prompted, generated) in counts:
            if prompted or generated:
                iteration = found.setdefault(index, IterationStats())
                iteration.prompt_token_stats.total += prompted
                iteration.num_generation_tokens += generated
        return found

    def _label(self, index: int) -> None:
        self._labelled.add(index)
        if self._labels is not None:
            self._labels.add(index)
            return
        # Not before: the size of the cache is a label, and a replica brings it.
        self._manager = StatLoggerManager(self._config, [index], enable_default_loggers=False)
        self._manager.log_engine_initialized()
        guard_statistics(self._manager)
        self._labels = StatLabels(self._manager)
        # Last, since the loggers and their labels use all metrics.
        _leave_out(REQUEST_METRICS)


class FleetReports:
    """Makes the reports of all replicas those of one engine, and passes them on. For the orchestrator's loop."""

    def __init__(self, statistics: ReplicaStatistics) -> None:
        self._statistics = statistics
        self._last: dict[int, SchedulerStats] = {}

    def keep(self, reports: Sequence[tuple[int, SchedulerStats]]) -> Iterator[SchedulerStats]:
        """Keep reports, each with its engine index; returns what the only engine of the front end reports instead."""
        counts: SchedulerStats | None = None
        whole: list[SchedulerStats] = []
        for index, report in reports:
            self._statistics.record(index, report)
            self._last[index] = report
            if has_single_values(report):
                whole.append(report)
            else:
                counts = report if counts is None else with_earlier_counts(report, counts)
        levels = fleet_levels(self._last.values())
        for report in whole if counts is None else [*whole, counts]:
            yield fleet_report(report, levels)

    def left(self, index: int) -> None:
        self._last.pop(index, None)
        self._statistics.left(index)


@dataclass
class _Counted:
    """What has been recorded of the tokens in a ledger. Each start of an engine has a ledger of its own."""

    ledger: LoadLedger
    prompted: int = 0
    generated: int = 0

    def take(self) -> tuple[int, int]:
        """The prompt tokens and generated tokens since the last call."""
        prompted, generated = self.ledger.prompted, self.ledger.generated
        taken = prompted - self.prompted, generated - self.generated
        self.prompted, self.generated = prompted, generated
        return taken


def _leave_out(names: frozenset[str]) -> None:
    for metric in [each for each in REGISTRY._collector_to_names if getattr(each, "_name", None) in names]:
        REGISTRY.unregister(metric)
