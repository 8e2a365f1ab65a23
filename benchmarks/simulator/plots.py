"""Plots that compare runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from simulator.contenders import OMNISCIENT, OURS
from simulator.report import Rank, Results

_COLUMNS = 3


def plot_workloads(results: Results, path: Path) -> None:
    """The 99th percentile of the time to the first token, one panel per workload."""
    rows = -(-len(results) // _COLUMNS)
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(13, 3.2 * rows), sharey=True, squeeze=False)
    for axis, (workload, summaries) in zip(axes.flat, results.items(), strict=False):
        _dots(axis, {policy: summary.ttft[-1] for policy, summary in summaries.items()})
        axis.set_title(workload, fontsize=10)
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    figure.suptitle("p99 time to the first token, s (log scale)", fontsize=11)
    _save(figure, path)


def plot_ranking(ranks: list[Rank], path: Path) -> None:
    """How far each policy is from the best one of each workload, on average."""
    figure, axis = pyplot.subplots(figsize=(7, 0.3 * len(ranks) + 1))
    _dots(axis, {rank.policy: rank.score for rank in ranks})
    axis.set_xlabel("TTFT p99 and mean latency, relative to the best policy of each workload", fontsize=8)
    _save(figure, path)


def _dots(axis: Axes, values: dict[str, float]) -> None:
    """A row per policy, the first at the top: ours blue, others orange, the omniscient one grey."""
    for policy, value in reversed(values.items()):
        colour = "tab:gray" if policy == OMNISCIENT else "tab:blue" if policy in OURS else "tab:orange"
        axis.plot([value], [policy], "o", color=colour)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=7)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
