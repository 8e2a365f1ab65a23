"""What the fleet costs: plain vLLM, vLLM's own data parallelism and the fleet, side by side under the same load.

    python benchmarks/overhead.py --model DIR --rounds 3

Every round starts each set-up in turn, runs every workload against it with `vllm bench serve`, and ends it, so that a
drift of the machine hits all of them. The table holds the median over the rounds. One engine has one core; two engines
have two, and share them with the server and the load generator, so compare set-ups of equal size with each other only.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_serve import bench_serve
from processes import MODEL_NAME, serving


@dataclass(frozen=True)
class Setup:
    """One way to serve the model: extra arguments, and the cores of its engines."""

    name: str
    args: tuple[str, ...]
    cores: str


@dataclass(frozen=True)
class Workload:
    """One load: requests, how many at a time, and their lengths in tokens."""

    name: str
    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int


SETUPS = (
    Setup("vLLM, one engine", (), "0"),
    Setup("vLLM, --data-parallel-size 2", ("--data-parallel-size", "2", "--api-server-count", "1"), "0|1"),
    Setup("fleet, --omni-dp-size-local 2", ("--omni-dp-size-local", "2"), "0|1"),
    Setup("fleet, --omni-dp-size-local 1", ("--omni-dp-size-local", "1"), "0"),
)
WORKLOADS = (
    Workload("one at a time", 100, 1, 64, 32),
    Workload("32 at a time", 400, 32, 64, 64),
)
ARGS = ("--enforce-eager", "--max-model-len", "1024")
METRICS = ("ttft", "tpot", "itl")
STATISTICS = ("mean", "median", "p99")


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to serve")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for round_number in range(options.rounds):
        # Every round starts with another set-up, so that none always runs on the coolest machine.
        turn = round_number % len(SETUPS)
        for setup in SETUPS[turn:] + SETUPS[:turn]:
            args = (str(options.model), "--served-model-name", MODEL_NAME, *ARGS, *setup.args)
            environment = {"VLLM_CPU_OMP_THREADS_BIND": setup.cores}
            with TemporaryDirectory() as logs, serving(setup.name, args, Path(logs, "log"), **environment) as url:
                for workload in WORKLOADS:
                    print(f"round {round_number + 1}/{options.rounds}: {setup.name}, {workload.name}", flush=True)
                    run = bench(options.model, url, workload, seed=round_number)
                    results.setdefault((workload.name, setup.name), []).append(run)
    table = "\n\n".join(render(workload, results) for workload in WORKLOADS) + "\n"
    print(table)


def bench(model: Path, url: str, workload: Workload, seed: int) -> dict[str, float]:
    """One run of the load. Raises RuntimeError if a request failed."""
    flags = ["--dataset-name", "random", "--num-warmups", "8"]
    flags += ["--random-input-len", str(workload.input_tokens), "--random-output-len", str(workload.output_tokens)]
    flags += ["--num-prompts", str(workload.requests), "--max-concurrency", str(workload.concurrency)]
    result = bench_serve(url, model, seed, METRICS, *flags)
    if result["completed"] != workload.requests:
        raise RuntimeError(f"{workload.requests - result['completed']} of {workload.requests} requests failed")
    return result


def render(workload: Workload, results: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    """One workload's table: medians over the rounds, times in milliseconds."""
    columns = [f"{metric.upper()} {statistic}" for metric in METRICS for statistic in STATISTICS]
    lines = [
        f"**{workload.name}**: {workload.requests} requests, {workload.input_tokens} + {workload.output_tokens} tokens",
        "",
        "| set-up | req/s | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) + 1),
    ]
    for setup in SETUPS:
        runs = results[workload.name, setup.name]
        cells = [f"{statistics.median(run['request_throughput'] for run in runs):.1f}"]
        for metric in METRICS:
            for statistic in STATISTICS:
                cells.append(f"{statistics.median(run[f'{statistic}_{metric}_ms'] for run in runs):.2f}")
        lines.append(f"| {setup.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
