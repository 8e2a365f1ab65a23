"""Several of vLLM's `SchedulerStats` made one: of all engines of a fleet, or of successive steps of one engine.

A report has levels (what runs and waits now) and counts (what has happened since the last report).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats


def fleet_levels(last: Collection[SchedulerStats]) -> dict[str, Any]:
    """The levels of a fleet, as fields of `SchedulerStats`; `last`: the last report of each replica that serves."""
    running = waiting = skipped = 0
    usage = 0.0
    for each in last:
        running += each.num_running_reqs
        waiting += each.num_waiting_reqs
        skipped += each.num_skipped_waiting_reqs
        usage += each.kv_cache_usage
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_skipped_waiting_reqs": skipped,
        "kv_cache_usage": usage / len(last) if last else 0.0,
        "num_kv_fetch_reqs_by_stage": _sums([each.num_kv_fetch_reqs_by_stage for each in last]),
        "waiting_lora_adapters": _sums([each.waiting_lora_adapters for each in last]),
        "running_lora_adapters": _sums([each.running_lora_adapters for each in last]),
    }


def fleet_report(report: SchedulerStats, levels: dict[str, Any]) -> SchedulerStats:
    """The counts of one engine's report with the levels of the whole fleet, for a front end that sees one engine."""
    # Unlike `copy`, it sets the fields that a Python stage does not send; others would be missing in what is sent on.
    return replace(report, **levels)


def has_single_values(report: SchedulerStats) -> bool:
    """Whether the report has values that `with_earlier_counts` cannot add up."""
    return bool(
        report.kv_connector_stats is not None
        or report.ec_connector_stats is not None
        or report.perf_stats is not None
        or report.kv_cache_eviction_events
    )


def with_earlier_counts(report: SchedulerStats, earlier: SchedulerStats) -> SchedulerStats:
    """A report of an engine with the counts of an earlier one added, which has no single values. Changes neither."""
    merged = copy(report)
    merged.prefix_cache_stats = _cache_counts(earlier.prefix_cache_stats, report.prefix_cache_stats)
    merged.connector_prefix_cache_stats = _cache_counts(
        earlier.connector_prefix_cache_stats, report.connector_prefix_cache_stats
    )
    merged.spec_decoding_stats = _speculation_counts(earlier.spec_decoding_stats, report.spec_decoding_stats)
    return merged


def _sums(each: Sequence[dict[str, int]]) -> dict[str, int]:
    if not any(each):
        return {}
    sums: Counter[str] = Counter()
    for numbers in each:
        sums.update(numbers)
    return dict(sums)


def _cache_counts(earlier: Any, later: Any) -> Any:
    """The sum of two `PrefixCacheStats`. Either may be None, or empty as that of a step without a prompt is."""
    if earlier is None or later is None:
        return earlier or later
    if not (later.requests or later.preempted_requests or later.reset):
        return earlier
    counts = copy(later)
    counts.reset = earlier.reset or later.reset
    counts.requests += earlier.requests
    counts.queries += earlier.queries
    counts.hits += earlier.hits
    counts.preempted_requests += earlier.preempted_requests
    counts.preempted_queries += earlier.preempted_queries
    counts.preempted_hits += earlier.preempted_hits
    counts.hits_by_source = _sums((earlier.hits_by_source, later.hits_by_source))
    return counts


def _speculation_counts(earlier: Any, later: Any) -> Any:
    """The sum of two `SpecDecodingStats`, either of which may be None."""
    if earlier is None or later is None:
        return earlier or later
    counts = copy(later)
    counts.num_drafts += earlier.num_drafts
    counts.num_draft_tokens += earlier.num_draft_tokens
    counts.num_accepted_tokens += earlier.num_accepted_tokens
    counts.num_accepted_tokens_per_pos = _by_position(
        earlier.num_accepted_tokens_per_pos, later.num_accepted_tokens_per_pos
    )
    counts.num_draft_tokens_per_pos = _by_position(earlier.num_draft_tokens_per_pos, later.num_draft_tokens_per_pos)
    return counts


def _by_position(earlier: list[int], later: list[int]) -> list[int]:
    return [first + second for first, second in zip(earlier, later, strict=True)]
