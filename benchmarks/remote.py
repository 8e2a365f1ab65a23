"""What the way to another node costs: a local replica, a remote one, and a remote one behind CURVE, in turns.

    python benchmarks/remote.py --model DIR --requests 100 --sleep 0.01

Three heads with one engine each stay up together and get one request at a time, in turns, so that all of them see the
same machine. Everything is on loopback: the wire itself costs nothing here. With --sleep the engines are vLLM's own but
sleep so many seconds for each step, so that what differs is the link and not which engine had a core to itself.
"""

import argparse
import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
from processes import Cluster, percentile
from setups import sleeping
from streams import Stream, run_stream

TOKENS = 64
WARM_UP = 3
REST_S = 1.2
SETUPS = ("local", "remote", "remote, CURVE")


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--sleep", type=float, help="seconds per step of engines that run no model")
    options = parser.parse_args()
    engine_args = () if options.sleep is None else sleeping({"step_s": options.sleep})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        clusters = {}
        for number, setup in enumerate(SETUPS):
            logs = Path(folder, str(number))
            logs.mkdir()
            cluster = Cluster(options.model, logs, secret if "CURVE" in setup else None)
            clusters[setup] = stack.enter_context(cluster)
            start(cluster, setup == "local", engine_args)
            # One after the other: engines that start together on one core starve each other.
            cluster.wait_until_healthy()
        rest_s = REST_S if options.sleep is None else 0.0
        report(asyncio.run(measure(clusters, options.requests, rest_s)))


def start(cluster: Cluster, local: bool, engine_args: Sequence[str]) -> None:
    """One engine, in the head or in a node beside it."""
    if local:
        cluster.head("--omni-dp-size-local", "1", *engine_args, VLLM_CPU_OMP_THREADS_BIND="0")
    else:
        cluster.head("--omni-dp-size-local", "0", *engine_args)
        cluster.node(*engine_args, VLLM_CPU_OMP_THREADS_BIND="0")


async def measure(clusters: dict[str, Cluster], requests: int, rest_s: float) -> dict[str, list[Stream]]:
    """One request at a time, in turns over the set-ups, each followed by a rest."""
    streams: dict[str, list[Stream]] = {setup: [] for setup in clusters}
    for number in range(WARM_UP + requests):
        for setup, cluster in clusters.items():
            async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
                stream = await run_stream(client, f"Count from {number}", TOKENS)
            # vLLM's workers spin for a second after their last step, and the next engine shares their core.
            await asyncio.sleep(rest_s)
            if stream.error:
                raise RuntimeError(f"{setup}: {stream.error}")
            if number >= WARM_UP:
                streams[setup].append(stream)
    return streams


def report(streams: dict[str, list[Stream]]) -> None:
    """Print one table, times in milliseconds."""
    print("| replica | requests | TTFT p50 | TTFT p99 | per token p50 | end to end p50 |")
    print("|---|---:|---:|---:|---:|---:|")
    for setup, runs in streams.items():
        first = [(run.arrivals[0] - run.started) * 1e3 for run in runs]
        whole = [(run.arrivals[-1] - run.started) * 1e3 for run in runs]
        token = [(run.arrivals[-1] - run.arrivals[0]) * 1e3 / (TOKENS - 1) for run in runs]
        cells = (percentile(first, 0.5), percentile(first, 0.99), percentile(token, 0.5), percentile(whole, 0.5))
        print(f"| {setup} | {len(runs)} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
