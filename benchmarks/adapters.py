"""More LoRA adapters than an engine has slots: the fleet's policies and vLLM's data parallelism, side by side.

    PYTHONPATH=. python benchmarks/adapters.py --model DIR

Each request takes one of the adapters at random. An engine that loads one lets all its requests wait, and computes
requests of no more adapters at once than it has slots. The engines sleep a modelled time instead of running a model;
`--real` runs the model on two.
"""

import argparse
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench_serve import bench_serve
from setups import Engines, Group, served, sleeping
from side_by_side import SERVICE_TIMES, block_size

from tests.engine.lora import make_lora

ADAPTER_LOAD_S = 0.2
SLOTS = 4
AT_A_TIME_PER_ENGINE = 16
REQUESTS_PER_ENGINE = 200
INPUT_TOKENS = 256
OUTPUT_TOKENS = 32


def main() -> None:
    """Run everything and print a row for each set-up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model of examples/cpu/tiny_model.py")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--setups", nargs="*", default=["fleet:round-robin", "fleet:prefix", "vllm-dp"])
    parser.add_argument("--real", action="store_true", help="run the model instead of sleeping, an engine to a core")
    options = parser.parse_args()
    print(
        f"{options.engines} engines, {SLOTS} slots each, {options.adapters} adapters. {os.cpu_count()} cores "
        f"({platform.machine()}), vLLM {version('vllm')}. Times in milliseconds.\n\n"
        "| set-up | req/s | TTFT p50 | TTFT p99 | latency p50 | latency p99 | adapters loaded | failed |\n"
        f"|---|{'---:|' * 7}",
        flush=True,
    )
    for text in options.setups:
        print(_row(Group.parse(text), options), flush=True)


def _row(group: Group, options: argparse.Namespace) -> str:
    requests, at_a_time = REQUESTS_PER_ENGINE * options.engines, AT_A_TIME_PER_ENGINE * options.engines
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "loads")
        log.touch()
        times = {**SERVICE_TIMES, "adapter_load_s": ADAPTER_LOAD_S, "adapter_log": str(log)}
        names = [f"adapter-{number}" for number in range(options.adapters)]
        modules = [f"{name}={make_lora(Path(folder, name), seed)}" for seed, name in enumerate(names)]
        args = [
            "--max-model-len",
            "1024",
            "--block-size",
            str(block_size(options)),
            "--num-gpu-blocks-override",
            "2048",
        ]
        args += ["--enable-lora", "--max-loras", str(SLOTS), "--max-lora-rank", "8", "--lora-modules", *modules]
        args += () if options.real else sleeping(times)
        cores = tuple(str(core) for core in range(options.engines)) if options.real else ()
        engines = Engines(options.model, options.engines, tuple(args), cores)
        with served(group, engines, None, Path(folder)) as (setup,), setup.open() as front:
            flags = {"dataset-name": "random", "random-input-len": INPUT_TOKENS, "random-output-len": OUTPUT_TOKENS}
            flags |= {"num-prompts": requests, "max-concurrency": at_a_time}
            given = [f"--{name}={value}" for name, value in flags.items()] + ["--lora-modules", *names]
            before = log.stat().st_size
            result = bench_serve(front.url, options.model, 0, ("ttft", "e2el"), *given)
            loads = log.stat().st_size - before
    cells = [f"{result['request_throughput']:.1f}"]
    cells += [f"{result[name]:,.0f}" for name in ("median_ttft_ms", "p99_ttft_ms", "median_e2el_ms", "p99_e2el_ms")]
    cells += ["" if options.real else str(loads), f"{1 - result['completed'] / requests:.1%}"]
    return f"| {setup.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
