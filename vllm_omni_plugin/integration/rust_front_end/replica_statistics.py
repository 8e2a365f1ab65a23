"""vLLM's own metrics of each replica, from the reports of the schedulers.

Behind the Rust front end no AsyncLLM records them. Metrics of requests (time to first token, ...) are the front end's.
"""

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_plugin.integration.engine_client.output_guard import guard_statistics
from vllm_omni_plugin.integration.engine_client.stat_labels import StatLabels
from vllm_omni_plugin.vllm_api.requests.scheduler_reports import has_single_values, with_earlier_counts

REQUEST_METRICS = frozenset(
    f"vllm:{name}"
    for name in (
        "admission_rejections",
        "corrupted_requests",
        "e2e_request_latency_seconds",
        "engine_sleep_state",
        "generation_tokens",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "mm_cache_hits",
        "mm_cache_queries",
        "num_preemptions",
        "prompt_tokens",
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
"""Metrics of vLLM's logger that no report of a scheduler sets. They are left out: they would be 0 for every replica."""

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
        record_soon: is called on the orchestrator's thread, and must make the other thread call `flush`.
    """

    def __init__(self, vllm_config: Any, record_soon: Callable[[], None]) -> None:
        self._config = vllm_config
        self._record_soon = record_soon
        self._lock = threading.Lock()
        self._serving: set[int] = set()
        self._whole: list[tuple[int, SchedulerStats]] = []
        self._sums: dict[int, SchedulerStats] = {}
        self._manager: StatLoggerManager | None = None
        self._labels: StatLabels | None = None
        self._labelled: set[int] = set()

    def joined(self, engine_index: int) -> None:
        """This replica has begun to serve."""
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
        """Record everything that has been taken."""
        with self._lock:
            serving, whole, sums = set(self._serving), self._whole, self._sums
            self._whole, self._sums = [], {}
        for index in sorted(serving | {index for index, _ in whole} | sums.keys()):
            self._label(index)
        for index, report in chain(whole, sums.items()):
            assert self._manager is not None
            self._manager.record(report, None, engine_idx=index)
        for index in sorted(self._labelled - serving):
            assert self._labels is not None
            self._labels.remove(index)
        self._labelled &= serving

    def _label(self, index: int) -> None:
        self._labelled.add(index)
        if self._labels is not None:
            self._labels.add(index)
            return
        # Not before: the size of the cache is a label, and a replica brings it.
        self._manager = StatLoggerManager(self._config, [index], enable_default_loggers=False)
        self._manager.log_engine_initialized()
        _leave_out(REQUEST_METRICS)
        guard_statistics(self._manager)
        self._labels = StatLabels(self._manager)


def _leave_out(names: frozenset[str]) -> None:
    for metric in [each for each in REGISTRY._collector_to_names if getattr(each, "_name", None) in names]:
        REGISTRY.unregister(metric)
