"""Running one load against several set-ups in turn, and the table of what came of it."""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench_serve import bench_serve
from setups import Engines, Front, Group, Setup, served, sleeping

SERVICE_TIMES = {"step_s": 0.04, "prefill_token_s": 0.0002, "sequence_s": 0.0004}
"""Of engines that sleep, in seconds: 25 iterations per second at most, 5,000 prompt tokens per second."""
DEFAULT_SETUPS = (
    "fleet:round-robin",
    "fleet:least-queue-length",
    "fleet:least-tokens",
    "fleet:prefix",
    "fleet:kv-aware",
    "vllm-dp",
    "router:round_robin,power_of_two,cache_aware",
)


@dataclass(frozen=True)
class Load:
    """What `vllm bench serve` sends.

    Attributes:
        requests: how many.
        flags: where they come from, how long they are and when they come; names without their dashes.
    """

    requests: int
    flags: Mapping[str, object]


@dataclass(frozen=True)
class Run:
    """One load against one set-up. Times in milliseconds.

    Attributes:
        setup: name of the set-up.
        seed: of the load. Runs of one seed had the same.
        throughput: requests per second.
        ttft_p50, ttft_p99: time to first token.
        latency_p50, latency_p99: time to the last one.
        hit_rate: share of the prompt tokens that engines had in their prefix caches.
        failed: share of the requests that were refused or failed.
    """

    setup: str
    seed: int
    throughput: float
    ttft_p50: float
    ttft_p99: float
    latency_p50: float
    latency_p99: float
    hit_rate: float
    failed: float


def arguments(description: str | None, engines: int) -> argparse.ArgumentParser:
    """What the benchmarks take; so many engines unless told otherwise."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to serve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first round's load; each further round takes the next"
    )
    parser.add_argument("--engines", type=int, default=engines, help="engines of every set-up")
    parser.add_argument("--setups", nargs="*", metavar="KIND:POLICY,...", default=list(DEFAULT_SETUPS))
    parser.add_argument("--router", type=Path, default=None, help="command vllm-router, in an environment of its own")
    parser.add_argument("--real", action="store_true", help="run the model instead of sleeping, an engine to a core")
    parser.add_argument(
        "--together", action="store_true", help="start every set-up once and load them in turn: 0.4 GB an engine"
    )
    parser.add_argument("--runs", type=Path, default=None, help="JSON lines to add the runs to; the table is of all")
    return parser


def block_size(options: argparse.Namespace) -> int:
    """Tokens in a block of every engine. vLLM's attention on the CPU takes multiples of 32 only."""
    return 32 if options.real else 16


def compare(options: argparse.Namespace, title: str, load: Load, engine_args: Sequence[str]) -> None:
    """Run the load against every set-up in every round and write the table.

    Args:
        options: made by `arguments`.
        title: of the table.
        load: what every set-up gets.
        engine_args: of `vllm serve` in every set-up.
    """
    # An end by SIGTERM ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cores = tuple(str(core) for core in range(options.engines)) if options.real else ()
    args = (*engine_args, "--block-size", str(block_size(options)), *(() if options.real else sleeping(SERVICE_TIMES)))
    engines = Engines(options.model, options.engines, args, cores)
    compared = [Group.parse(text) for text in options.setups]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = options.runs or Path(folder, "runs.jsonl")

        def serve(group: Group) -> AbstractContextManager[list[Setup]]:
            return served(group, engines, options.router, Path(folder))

        up = {group: stack.enter_context(serve(group)) for group in compared if options.together}
        for seed, group in _turns(compared, options.rounds, options.seed):
            with nullcontext(up[group]) if options.together else serve(group) as setups:
                for setup in setups:
                    run = _run(setup, engines.model, load, seed)
                    print(run, flush=True)
                    with store.open("a") as lines:
                        lines.write(json.dumps(vars(run)) + "\n")
        runs = [Run(**json.loads(line)) for line in store.read_text().splitlines()]
    print(f"## {title}\n\n{_machine(engines, options.real)}\n\n{_table(runs)}\n")


def _turns(groups: Sequence[Group], rounds: int, seed: int) -> Iterator[tuple[int, Group]]:
    """Every round begins with another group, so that a drift of the machine hits all of them."""
    for number in range(rounds):
        turn = number % len(groups)
        for group in (*groups[turn:], *groups[:turn]):
            yield seed + number, group


def _run(setup: Setup, model: Path, load: Load, seed: int) -> Run:
    with setup.open() as front:
        front.empty_caches()
        before = _cached_and_asked(front)
        result = _bench(front.url, model, load, seed)
        hits, queries = (now - then for now, then in zip(_cached_and_asked(front), before, strict=True))
    return Run(
        setup.name,
        seed,
        result["request_throughput"],
        result["median_ttft_ms"],
        result["p99_ttft_ms"],
        result["median_e2el_ms"],
        result["p99_e2el_ms"],
        hits / queries if queries else 0.0,
        1 - result["completed"] / load.requests,
    )


def _cached_and_asked(front: Front) -> tuple[float, float]:
    return front.total("vllm:prefix_cache_hits_total"), front.total("vllm:prefix_cache_queries_total")


def _bench(url: str, model: Path, load: Load, seed: int) -> dict[str, float]:
    flags = [f"--{name}={value}" for name, value in load.flags.items()]
    return bench_serve(url, model, seed, ("ttft", "e2el"), *flags, f"--num-prompts={load.requests}")


def _table(runs: Sequence[Run]) -> str:
    lines = [
        "| set-up | rounds | req/s | hit rate | TTFT p50 | TTFT p99 | latency p50 | latency p99 | refused or failed |",
        "|---|" + "---:|" * 8,
    ]
    known = [name for text in DEFAULT_SETUPS for name in Group.parse(text).names]
    for name in sorted(
        {run.setup for run in runs}, key=lambda name: known.index(name) if name in known else len(known)
    ):
        own = [run for run in runs if run.setup == name]
        cells = [str(len(own)), _cell(own, "throughput", ".1f"), _cell(own, "hit_rate", ".1%")]
        cells += [_cell(own, time, ",.0f") for time in ("ttft_p50", "ttft_p99", "latency_p50", "latency_p99")]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{max(run.failed for run in own):.1%}"]) + " |")
    return "\n".join(lines)


def _cell(runs: Sequence[Run], attribute: str, form: str) -> str:
    """The median, and of several rounds the least and the most."""
    values = sorted(float(getattr(run, attribute)) for run in runs)
    least, most = f"{values[0]:{form}}", f"{values[-1]:{form}}"
    return f"{statistics.median(values):{form}}" + (f" ({least} to {most})" if least != most else "")


def _machine(engines: Engines, real: bool) -> str:
    what = "which run the model, each on a core of its own" if real else f"which sleep {json.dumps(SERVICE_TIMES)}"
    return (
        f"Engines in every set-up: {engines.count}, {what}. {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, vLLM {version('vllm')}. Times in milliseconds, medians of rounds (least to "
        "most); the share of refused or failed requests is the highest."
    )
