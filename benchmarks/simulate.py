"""Ranks load-balancing policies on simulated fleets: no engine, no sleeping, the same requests for every policy.

    python benchmarks/simulate.py --markdown FILE --plots FOLDER
    python benchmarks/simulate.py --workloads week --replicas 1000 --requests 1000000 --policies least-tokens

Engines are modelled as in `vllm_omni_plugin.sim` (continuous batching, chunked prefill, prefix cache), but leap from
event to event; policies are the real classes, told and charged as the orchestrator does it. A profile says how fast
engines are: `accelerator` is an assumption, `cpu` was fitted to a real engine by benchmarks/calibrate.py.
"""

import argparse
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from simulator.contenders import OURS, PEERS, build
from simulator.metrics import Summary
from simulator.overloads import OVERLOADS
from simulator.profiles import profile
from simulator.report import Results, ranking, ranking_table, table, verdict
from simulator.simulation import Simulation
from simulator.workload import Scale
from simulator.workloads import WEEK, WORKLOADS

from vllm_omni_plugin.balancing import known_policies

_ALL = {**WORKLOADS, **OVERLOADS}


class Run(NamedTuple):
    """One cell of the comparison."""

    workload: str
    policy: str


class Outcome(NamedTuple):
    """What came of it, and what it cost to find out."""

    summary: Summary
    events: int
    seconds: float


def simulate(scale: Scale, run: Run) -> Outcome:
    """Run one policy under one workload."""
    workload = _ALL[run.workload](scale)
    began = time.perf_counter()
    simulation = Simulation(workload, build(run.policy, scale.seed), scale.settings, scale.replicas)
    summary = simulation.run().summary()
    return Outcome(summary, simulation.events, time.perf_counter() - began)


def main() -> None:
    """Run all cells and print the tables."""
    options = _options()
    scale = Scale(options.replicas, options.requests, profile(options.profile), options.seed)
    runs = [Run(workload, policy) for workload in options.workloads for policy in options.policies]
    began = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(partial(simulate, scale), runs))
    seconds = time.perf_counter() - began
    results = _by_workload(runs, outcomes)
    events = sum(outcome.events for outcome in outcomes)
    text = _document(options, results)
    cost = f"{events:,} events in {seconds:.1f} s; {_rate(outcomes):,.0f} per second and process."
    print(f"{text}\n{cost}")
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.plots is not None:
        from simulator.plots import plot_ranking, plot_workloads

        plot_workloads(results, options.plots / f"simulate-{options.profile}-ttft.png")
        plot_ranking(ranking(results), options.plots / f"simulate-{options.profile}-ranking.png")


def _options() -> argparse.Namespace:
    available = [name for name in OURS if name in known_policies()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8000, help="about so many in each workload")
    parser.add_argument("--profile", default="accelerator", help="accelerator, cpu, or a file of calibrate.py")
    parser.add_argument("--workloads", nargs="+", default=[n for n in WORKLOADS if n != WEEK], choices=_ALL)
    parser.add_argument("--policies", nargs="+", default=[*available, *PEERS], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw PNG files there; needs matplotlib")
    return parser.parse_args()


def _by_workload(runs: Iterable[Run], outcomes: Iterable[Outcome]) -> Results:
    results: dict[str, dict[str, Summary]] = {}
    for run, outcome in zip(runs, outcomes, strict=True):
        results.setdefault(run.workload, {})[run.policy] = outcome.summary
    return results


def _document(options: argparse.Namespace, results: Results) -> str:
    parts = [f"{options.replicas} replicas, profile `{options.profile}`, seed {options.seed}.\n"]
    for workload, summaries in results.items():
        meaning = " ".join((getattr(_ALL[workload], "func", _ALL[workload]).__doc__ or "").split())
        parts.append(f"### {workload}\n\n{meaning}\n\n{table(summaries)}\n")
    ranks = ranking(results)
    parts.append(f"### Over all of these workloads\n\n{ranking_table(ranks)}\n\n{verdict(ranks)}\n")
    return "\n".join(parts)


def _rate(outcomes: Iterable[Outcome]) -> float:
    outcomes = list(outcomes)
    return sum(outcome.events for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes)


if __name__ == "__main__":
    main()
