"""What the fleet costs: plain vLLM, vLLM's own data parallelism and the fleet, side by side under the same load.

    python benchmarks/overhead.py --model DIR --rounds 3 --out benchmarks/results/overhead.md

Every round starts each set-up in turn, runs every workload against it with `vllm bench serve`, and ends it, so that a
drift of the machine hits all of them. The table holds the median over the rounds. One engine has one core; two engines
have two, and share them with the server and the load generator, so compare set-ups of equal size with each other only.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "tiny"
START_S = 180.0


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
METRICS = ("ttft", "tpot", "itl")
STATISTICS = ("mean", "median", "p99")


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to serve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="Markdown file to write beside printing")
    options = parser.parse_args()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for round_number in range(options.rounds):
        # Every round starts with another set-up, so that none always runs on the coolest machine.
        turn = round_number % len(SETUPS)
        for setup in SETUPS[turn:] + SETUPS[:turn]:
            with served(options.model, setup) as url:
                for workload in WORKLOADS:
                    print(f"round {round_number + 1}/{options.rounds}: {setup.name}, {workload.name}", flush=True)
                    run = bench(options.model, url, workload, seed=round_number)
                    results.setdefault((workload.name, setup.name), []).append(run)
    table = "\n\n".join(render(workload, results) for workload in WORKLOADS) + "\n"
    print(table)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(table)


@contextmanager
def served(model: Path, setup: Setup) -> Iterator[str]:
    """Serve the model until the block ends; yields the URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [tool("vllm"), "serve", str(model), "--served-model-name", MODEL_NAME, "--enforce-eager"]
    command += ["--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port), *setup.args]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": setup.cores,
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def wait_until_healthy(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Return when the server answers. Raises RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError(f"{url} does not answer; the server's exit code is {server.poll()}")


def bench(model: Path, url: str, workload: Workload, seed: int) -> dict[str, float]:
    """One run of `vllm bench serve`. Raises RuntimeError if a request failed, which the command itself ignores."""
    with tempfile.TemporaryDirectory() as directory:
        command = [tool("vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url]
        command += ["--model", str(model), "--served-model-name", MODEL_NAME, "--dataset-name", "random"]
        command += [
            "--random-input-len",
            str(workload.input_tokens),
            "--random-output-len",
            str(workload.output_tokens),
        ]
        command += ["--num-prompts", str(workload.requests), "--max-concurrency", str(workload.concurrency)]
        command += ["--num-warmups", "8", "--ignore-eos", "--seed", str(seed), "--disable-tqdm"]
        command += ["--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "99"]
        command += ["--save-result", "--result-dir", directory, "--result-filename", "result.json"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result: dict[str, float] = json.loads(Path(directory, "result.json").read_text())
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


def tool(name: str) -> str:
    """A command of the environment that this script runs in."""
    return str(Path(sys.executable).with_name(name))


if __name__ == "__main__":
    main()
