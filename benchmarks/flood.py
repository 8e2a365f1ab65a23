"""A calm tenant beside a flooding one: its time to first token, alone and beside the flood.

    python benchmarks/flood.py --model DIR --setups fleet:prefix+admission vllm-dp --runs RUNS.jsonl --out FILE
    python benchmarks/flood.py --model DIR --setups fleet:prefix+admission fleet:prefix+large-headroom --runs RUNS.jsonl

The calm tenant sends 0.3 times the capacity of the engines, the flooding one 5 times. In the set-up `weights` the calm
tenant has three times the weight; in `large-headroom` the admission file has `headroom: large`. Engines, lengths and
set-ups are those of overload.py.
"""

import asyncio
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from arrivals import Asked, Clients, Figures, arrive, during
from overload import DEADLINE_S, LENGTHS, SETTLE_S, all_setups, arguments, machine, measured_capacity
from setups import Front, Group

CALM, FLOOD = 0.3, 5.0
"""Multiples of the capacity."""
WARM_UP_S = 10.0
MEASURED_S = 40.0


@dataclass(frozen=True)
class Run:
    """Both tenants on one set-up.

    Attributes:
        capacity: requests per second of the engines.
        alone, beside: figures of the calm tenant, without and with the flood.
        flood: figures of the flooding tenant.
        machine_cores: cores in use on the whole machine during the flood, also by other work.
    """

    setup: str
    seed: int
    capacity: float
    alone: Figures
    beside: Figures
    flood: Figures
    machine_cores: float


def main() -> None:
    """Run everything and write the table."""
    options = arguments(__doc__).parse_args()
    # SIGTERM must also stop the processes that were started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    groups = [Group.parse(text) for text in options.setups]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = options.runs or Path(folder, "runs.jsonl")
        capacity = options.capacity
        for setup in all_setups(stack, groups, options, Path(folder)):
            with setup.open() as front, store.open("a") as lines:
                capacity = capacity or measured_capacity(front, options.engines)
                run = asyncio.run(_measure(front, setup.name, capacity, options.seed))
                print(run, flush=True)
                lines.write(json.dumps(asdict(run)) + "\n")
        runs = list(_read(store))
    table = f"{machine(options)}\n\n{_table(runs)}\n"
    print(table)
    if options.out is not None:
        options.out.write_text(table)


async def _measure(front: Front, setup: str, capacity: float, seed: int) -> Run:
    alone = await _arrive(front, capacity * CALM, "calm", seed)
    await asyncio.sleep(SETTLE_S)
    beside, flood, (before, after) = await asyncio.gather(
        _arrive(front, capacity * CALM, "calm", seed),
        _arrive(front, capacity * FLOOD, "flood", seed + 1),
        during(WARM_UP_S, MEASURED_S, _machine_seconds),
    )
    cores = (after - before) / MEASURED_S
    return Run(setup, seed, capacity, _figures(alone), _figures(beside), _figures(flood), cores)


async def _arrive(front: Front, rate: float, tenant: str, seed: int) -> list[Asked]:
    clients = Clients(DEADLINE_S, DEADLINE_S, tenant)
    return await arrive(front.url, rate, WARM_UP_S + MEASURED_S, LENGTHS, clients, random.Random(seed))


def _figures(asked: Sequence[Asked]) -> Figures:
    return Figures.of([one for one in asked if one.at >= WARM_UP_S], MEASURED_S)


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def _read(store: Path) -> Iterator[Run]:
    for line in store.read_text().splitlines():
        row = json.loads(line)
        yield Run(**(row | {name: Figures(**row[name]) for name in ("alone", "beside", "flood")}))


def _table(runs: Sequence[Run]) -> str:
    lines = [
        "| set-up | calm alone: TTFT p50 / p99, s | beside the flood | p99 against alone | calm answered in time "
        "| flood: offered/s | answered in time/s | refused 429 / 503 | machine, cores |",
        "|---|" + "---:|" * 8,
    ]
    for run in runs:
        alone, beside, flood = run.alone, run.beside, run.flood
        offered, calm = sum(flood.outcomes.values()), sum(beside.outcomes.values())
        cells = [f"{alone.ttft_p50:.3f} / {alone.ttft_p99:.3f}", f"{beside.ttft_p50:.3f} / {beside.ttft_p99:.3f}"]
        cells += [f"{beside.ttft_p99 / alone.ttft_p99:.2f}", f"{beside.outcomes.get('good', 0) / calm:.1%}"]
        cells += [f"{flood.offered:.1f}", f"{flood.goodput:.1f}"]
        cells += [" / ".join(f"{flood.outcomes.get(status, 0) / offered:.1%}" for status in ("429", "503"))]
        lines.append(f"| {run.setup} | " + " | ".join([*cells, f"{run.machine_cores:.2f}"]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
