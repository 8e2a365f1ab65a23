"""Overload: how many requests are answered in time, refused, or computed in vain.

    python benchmarks/overload.py --model DIR --setups fleet:prefix vllm-dp --runs RUNS.jsonl

Requests arrive in a Poisson process at multiples of the measured capacity, independent of earlier requests. Clients
send their deadline in `X-Request-Timeout`; an answer whose first token comes later has no value. Impatient clients hang
up at their deadline, patient ones wait on (`--patience`), as gateways and scripts do. The engines sleep a modelled
time, so that they are the limit and not this machine's cores.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path

from arrivals import FAILED, Clients, Figures, Lengths, arrive, saturate
from setups import Engines, Front, Group, Setup, served, sleeping

SERVICE_TIMES = {"step_s": 0.03, "prefill_token_s": 0.0002, "sequence_s": 0.0005}
MAX_NUM_SEQS = 16
LENGTHS = Lengths(prompt_words=(20, 80), output_tokens=(24, 72))
DEADLINE_S = 5.0
PATIENCE_S = 20.0
"""Patience of patient clients."""
MEASURED_S = 20.0
SATURATION_S = 18.0
SETTLE_S = 2.0
LOADS = (0.9, 1.5, 2.0, 4.0)
DEFAULT_SETUPS = ("fleet:prefix", "fleet:prefix+admission", "vllm-dp", "router:round_robin,round_robin+limits")
PLANS = {
    "admission": "classes:\n  - name: interactive\n    deadline: 5\n",
    "weights": "classes:\n  - name: interactive\n    deadline: 5\ntenants:\n  calm: {weight: 3}\n",
}
"""Admission files by name."""


@dataclass(frozen=True)
class Run:
    """One load on one set-up.

    Attributes:
        load: offered requests as a multiple of the capacity.
        capacity: requests per second of the engines.
        figures: of the requests that arrived during the measurement.
        wasted: share of the generated tokens of the whole run in answers that were late or broken off.
    """

    setup: str
    patience_s: float
    load: float
    seed: int
    capacity: float
    figures: Figures
    wasted: float


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to serve")
    parser.add_argument("--engines", type=int, default=3, help="engines in every set-up")
    parser.add_argument("--setups", nargs="*", metavar="KIND:POLICY", default=list(DEFAULT_SETUPS))
    parser.add_argument("--router", type=Path, default=None, help="the command vllm-router, in its own environment")
    parser.add_argument("--capacity", type=float, default=None, help="requests per second; measured if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--runs", type=Path, default=None, help="JSON lines file to append the runs to; the table has all its runs"
    )
    parser.add_argument("--loads", nargs="*", type=float, default=list(LOADS), help="multiples of the capacity")
    parser.add_argument("--patience", nargs="*", type=float, default=[DEADLINE_S], help="seconds")
    options = parser.parse_args()
    # SIGTERM must also stop the processes that were started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    groups = [Group.parse(text) for text in options.setups]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = options.runs or Path(folder, "runs.jsonl")
        capacity = options.capacity
        for setup in all_setups(stack, groups, options, Path(folder)):
            with setup.open() as front:
                capacity = capacity or measured_capacity(front, options.engines)
                for patience_s, load in product(options.patience, options.loads):
                    # Without a queue, patience makes no difference.
                    if load > 1 or patience_s == DEADLINE_S:
                        run = _measure(front, setup.name, capacity, load, patience_s, options.seed)
                        print(run, flush=True)
                        with store.open("a") as lines:
                            lines.write(json.dumps(asdict(run)) + "\n")
        rows = [json.loads(line) for line in store.read_text().splitlines()]
    runs = [Run(**{**row, "figures": Figures(**row["figures"])}) for row in rows]
    print(_report(options, runs))


def engines(model: Path, count: int) -> Engines:
    """The engines of every set-up."""
    args = ("--max-model-len", "1024", "--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "1024")
    return Engines(model, count, (*args, "--num-gpu-blocks-override", "4096", *sleeping(SERVICE_TIMES)))


def all_setups(stack: ExitStack, groups: Sequence[Group], options: argparse.Namespace, folder: Path) -> Iterator[Setup]:
    """Start the engines of all groups at once, because they use almost no CPU, and yield their set-ups."""
    fleet, limits = engines(options.model, options.engines), _limits(options.engines, folder)
    with ThreadPoolExecutor(len(groups)) as pool:
        contexts = [served(group, fleet, options.router, folder, limits) for group in groups]
        up = list(pool.map(stack.enter_context, contexts))
    return chain.from_iterable(up)


def _limits(count: int, folder: Path) -> dict[str, Sequence[str]]:
    # As many requests as the engines have sequence slots, and a queue that they empty within the deadline.
    seats = count * MAX_NUM_SEQS
    router = {"max-concurrent-requests": seats, "queue-size": 2 * seats, "queue-timeout-secs": int(DEADLINE_S)}
    limits: dict[str, Sequence[str]] = {"router+limits": [f"--{name}={value}" for name, value in router.items()]}
    for name, plan in PLANS.items():
        file = folder / f"{name}.yaml"
        file.write_text(plan)
        limits[f"fleet+{name}"] = ("--omni-admission", str(file))
    return limits


def measured_capacity(front: Front, count: int) -> float:
    """Requests per second that the engines answer with twice as many streams as they have sequence slots."""
    streams = 2 * count * MAX_NUM_SEQS
    capacity = asyncio.run(saturate(front.url, streams, SATURATION_S, LENGTHS, random.Random(0)))
    print(f"capacity: {capacity:.1f} requests/s", flush=True)
    time.sleep(SETTLE_S)
    return capacity


def _measure(front: Front, setup: str, capacity: float, load: float, patience_s: float, seed: int) -> Run:
    tokens = front.total("vllm:generation_tokens_total")
    clients, seconds = Clients(DEADLINE_S, patience_s), warm_up_s(load) + MEASURED_S
    asked = asyncio.run(arrive(front.url, capacity * load, seconds, LENGTHS, clients, random.Random(seed)))
    for error in sorted({one.answer.error for one in asked if one.outcome == FAILED})[:5]:
        print(f"failed: {error}", flush=True)
    # The engines abort requests a little after their clients hang up.
    time.sleep(SETTLE_S)
    computed = front.total("vllm:generation_tokens_total") - tokens
    useful = sum(one.tokens for one in asked if one.good)
    figures = Figures.of([one for one in asked if one.at >= warm_up_s(load)], MEASURED_S)
    return Run(setup, patience_s, load, seed, capacity, figures, 1 - useful / computed)


def warm_up_s(load: float) -> float:
    """Seconds until an unbounded queue is longer than the deadline."""
    return 2.0 + (1.2 * DEADLINE_S / (load - 1) if load > 1 else 2.0)


def machine(options: argparse.Namespace) -> str:
    """A sentence about the engines and the machine."""
    times = json.dumps(SERVICE_TIMES)
    return (
        f"{options.engines} engines in every set-up: vLLM's own engine core and scheduler, {MAX_NUM_SEQS} sequences "
        f"each, which sleep {times} instead of running a model. {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, vLLM {version('vllm')}."
    )


def _report(options: argparse.Namespace, runs: Sequence[Run]) -> str:
    parts = [machine(options)]
    for patience_s in sorted({run.patience_s for run in runs}):
        what = f"### Clients that hang up after {patience_s:g} s without a first token; deadline {DEADLINE_S:g} s"
        parts.append(f"{what}\n\n{_table([run for run in runs if run.patience_s == patience_s])}")
    return "\n\n".join(parts) + "\n"


def _table(runs: Sequence[Run]) -> str:
    lines = [
        "| set-up | load | offered/s | goodput/s | of capacity | refused 429 / 503 | late | given up | failed "
        "| TTFT p50 / p99, s | tokens in vain |",
        "|---|" + "---:|" * 10,
    ]
    for run in sorted(runs, key=lambda run: run.load):
        figures, offered = run.figures, sum(run.figures.outcomes.values())
        share = {outcome: f"{figures.outcomes.get(outcome, 0) / offered:.1%}" for outcome in _OUTCOMES}
        cells = [f"{run.load:g}x", f"{figures.offered:.1f}", f"{figures.goodput:.1f}"]
        cells += [f"{figures.goodput / run.capacity:.0%}", f"{share['429']} / {share['503']}"]
        cells += [share[outcome] for outcome in ("late", "given up", "failed")]
        cells += [f"{figures.ttft_p50:.2f} / {figures.ttft_p99:.2f}", f"{run.wasted:.1%}"]
        lines.append(f"| {run.setup} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_OUTCOMES = ("429", "503", "late", "given up", "failed")


if __name__ == "__main__":
    main()
