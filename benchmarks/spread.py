"""How evenly several heads spread requests that see each other's work late, against one head that has all requests.

    python benchmarks/spread.py --markdown benchmarks/results/spread.md

Engines, policies and workloads are those of benchmarks/simulate.py, and heads tell each other of their work by the real
`WorkExchange`. Each request comes to one of the heads by chance, whatever session it belongs to. Columns:

delay      how old what heads know of each other may be: up to 40 ms for a report to be due, the rest on the way; none:
           they do not tell each other, and know their own and what engines say; alone: policies do not heed that
           others choose as well
in flight  coefficient of variation over the replicas of their unfinished requests, mean over the middle of the run
work       the same of the seconds that an engine has to compute for what it has not finished
"""

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from simulator.contenders import build
from simulator.metrics import Summary
from simulator.profiles import profile
from simulator.requests import Session
from simulator.several_heads import SeveralHeads
from simulator.simulation import Simulation
from simulator.traffic import Requests, length, poisson, tokens
from simulator.workload import Scale, Workload
from simulator.workloads import WORKLOADS

SAMPLE_S = 0.05
DELAYS: dict[str, float | None] = {"0": 0.0, "40": 0.04, "100": 0.1, "100 alone": 0.1, "none": None}
AS_IF_ALONE = "100 alone"
POLICIES = ("prefix", "kv-aware", "least-queue-length", "least-tokens", "session")


def short(scale: Scale) -> Workload:
    """Prompts of about 200 tokens with answers of about 8, many in any tenth of a second."""
    rng = random.Random(scale.seed)
    requests = Requests(rng)
    return Workload(
        Session(start, [requests.make(tokens(rng, length(rng, 200, 0.8, 2048)), length(rng, 8, 0.5, 64), 64)])
        for start in islice(poisson(rng, scale.rate(0.75, 200, 8)), scale.requests)
    )


CHOICE = {**WORKLOADS, "short": short}


class Run(NamedTuple):
    """One row: a workload, a policy, a number of heads, and the delay in ms by name."""

    workload: str
    policy: str
    heads: int
    delay: str


class Spread(NamedTuple):
    """What came of a run."""

    summary: Summary
    in_flight: float
    work: float


class SpreadSimulation(Simulation):
    """A simulation with several heads, which looks at the replicas now and then."""

    def __init__(self, scale: Scale, run: Run) -> None:
        policies = [build(run.policy, 1000 * scale.seed + head) for head in range(run.heads)]
        super().__init__(CHOICE[run.workload](scale), policies[0], scale.settings, scale.replicas)
        self._scale = scale
        self._heads = SeveralHeads(
            policies,
            self._replicas,
            scale.settings,
            self._clock,
            self._after,
            self._send,
            DELAYS[run.delay],
            run.delay != AS_IF_ALONE,
            random.Random(scale.seed),
        )
        self._head = self._heads
        self._samples: list[tuple[float, float]] = []
        self._look()

    def spread(self) -> Spread:
        """Run, and say what came of it."""
        summary = self.run().summary()
        middle = np.array(self._samples[len(self._samples) // 5 : -len(self._samples) // 5])
        in_flight, work = middle.mean(axis=0).tolist()
        return Spread(summary, in_flight, work)

    def _look(self) -> None:
        settings, now = self._scale.settings, self._clock.now
        in_flight: list[int] = []
        work: list[float] = []
        for place, replica in enumerate(self._replicas):
            jobs = self._heads.in_flight(place)
            in_flight.append(len(jobs))
            seconds = 0.0
            for job in jobs:
                seconds += (job.prompt_tokens - job.computed) * settings.prefill_token_s
                seconds += (job.output_tokens - replica.engine.produced(job, now)) * settings.sequence_s
            work.append(seconds)
        if any(in_flight):
            self._samples.append((_variation(in_flight), _variation(work)))
        self._after(SAMPLE_S, self._look)


def _variation(values: list[int] | list[float]) -> float:
    array = np.array(values)
    return float(array.std() / array.mean()) if array.any() else 0.0


def simulate(scale: Scale, run: Run) -> Spread:
    """One row."""
    return SpreadSimulation(scale, run).spread()


def main() -> None:
    """Run all rows and print the tables."""
    options = _options()
    scale = Scale(options.replicas, options.requests, profile(options.profile), options.seed)
    text = ""
    for workload in options.workloads:
        rows = [
            Run(workload, policy, heads, delay)
            for policy in options.policies
            for heads, delay in [(1, "none"), *((options.heads, delay) for delay in options.delays)]
        ]
        with ProcessPoolExecutor(options.jobs) as pool:
            spreads = list(pool.map(partial(simulate, scale), rows))
        text += f"### {workload}\n\n{_table(rows, spreads)}\n\n"
        print(f"### {workload}\n\n{_table(rows, spreads)}\n", flush=True)
    if options.markdown is not None:
        options.markdown.write_text(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8000, help="about so many in each workload")
    parser.add_argument("--profile", default="accelerator", help="accelerator, cpu, or a file of calibrate.py")
    parser.add_argument("--workloads", nargs="+", default=["steady", "bursty", "short"], choices=CHOICE)
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="NAME")
    parser.add_argument("--delays", nargs="+", default=[*DELAYS], choices=DELAYS, metavar="DELAY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    return parser.parse_args()


def _table(rows: list[Run], spreads: list[Spread]) -> str:
    lines = [
        "| policy | heads | delay, ms | in flight | work | TTFT p50, ms | p99 | latency mean, s | hit rate |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row, (summary, in_flight, work) in zip(rows, spreads, strict=True):
        cells = [row.policy, str(row.heads), row.delay if row.heads > 1 else "-", f"{in_flight:.3f}", f"{work:.3f}"]
        cells += [f"{1000 * summary.ttft[0]:,.0f}", f"{1000 * summary.ttft[-1]:,.0f}"]
        cells += [f"{summary.mean_latency:.3f}", f"{summary.hit_rate:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
