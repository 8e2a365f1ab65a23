"""Markdown tables that compare runs."""

from collections.abc import Iterable, Mapping
from math import exp, log
from typing import NamedTuple

from simulator.contenders import OMNISCIENT, OURS
from simulator.metrics import Summary

Results = Mapping[str, Mapping[str, Summary]]
"""By workload and policy."""

_HEADINGS = (
    "policy | TTFT p50, ms | p90 | p99 | latency p50, s | p90 | p99 | mean | req/s | hit rate | spread | refused"
)


class Rank(NamedTuple):
    """A policy over all workloads: geometric means of its ratio to the best policy of each workload.

    The omniscient policy is never the best one.

    Attributes:
        ttft: ratio of the 99th percentile of the time to the first token.
        latency: ratio of the mean latency.
        score: geometric mean of both; 1 would be the best everywhere.
    """

    policy: str
    ttft: float
    latency: float
    score: float


def table(summaries: Mapping[str, Summary]) -> str:
    """One workload: a row per policy."""
    rows = [f"| {_HEADINGS} |", "|---|" + "---:|" * _HEADINGS.count("|")]
    for policy, summary in summaries.items():
        cells = [
            *(f"{1000 * seconds:,.0f}" for seconds in summary.ttft),
            *(f"{seconds:.2f}" for seconds in (*summary.latency, summary.mean_latency)),
            f"{summary.requests_per_s:.1f}",
            f"{summary.hit_rate:.0%}",
            f"{summary.spread:.2f}",
            f"{summary.refused:.2%}",
        ]
        rows.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(rows)


def ranking(results: Results) -> list[Rank]:
    """All policies that ran under every workload, the best first."""
    policies = set.intersection(*(set(summaries) for summaries in results.values()))
    ranks = []
    for policy in policies:
        ttft = _geometric_mean(
            summaries[policy].ttft[-1] / min(s.ttft[-1] for name, s in summaries.items() if name != OMNISCIENT)
            for summaries in results.values()
        )
        latency = _geometric_mean(
            summaries[policy].mean_latency / min(s.mean_latency for name, s in summaries.items() if name != OMNISCIENT)
            for summaries in results.values()
        )
        ranks.append(Rank(policy, ttft, latency, (ttft * latency) ** 0.5))
    return sorted(ranks, key=lambda rank: (rank.score, rank.policy))


def ranking_table(ranks: Iterable[Rank]) -> str:
    """A row per policy."""
    rows = ["| policy | TTFT p99 | mean latency | both |", "|---|---:|---:|---:|"]
    rows += [f"| {rank.policy} | {rank.ttft:.2f} | {rank.latency:.2f} | {rank.score:.2f} |" for rank in ranks]
    return "\n".join(rows)


def verdict(ranks: Iterable[Rank]) -> str:
    """A sentence with the best built-in policy; "" if none ran."""
    ours = [rank for rank in ranks if rank.policy in OURS]
    if not ours:
        return ""
    return (
        f"Best built-in policy over these workloads: `{ours[0].policy}` ({ours[0].score:.2f} times the best of each)."
    )


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))
