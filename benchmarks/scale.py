"""How many replicas one head can have: simulated ones attach, requests run, and processes are looked at.

    python benchmarks/scale.py --model DIR --replicas 256

Prints the time until all replicas serve, requests per second, and the memory and processor time of the head and its
coordinator: at rest, and under load. The simulated replicas run on the same machine and take most of its processor
under load, so requests per second say what this machine can do, and not what the head can.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from processes import Cluster, percentile
from streams import Stream, run_stream

MEGABYTE = 1 << 20
REST_S = 10.0


@dataclass(frozen=True)
class Usage:
    """What a process has used when it was looked at.

    Attributes:
        at: monotonic seconds of the look.
        cpu_s: processor seconds so far.
        memory_mb: resident memory.
    """

    at: float
    cpu_s: float
    memory_mb: float


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4, help="processes that the replicas are spread over")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs, Cluster(options.model, Path(logs)) as cluster:
        head = cluster.head("--omni-dp-size-local", "0")
        began = time.monotonic()
        for number in range(options.processes):
            share = options.replicas // options.processes + (number < options.replicas % options.processes)
            cluster.sim("--replicas", str(share))
        cluster.wait_until_healthy()
        cluster.wait_for_replicas(options.replicas)
        print(f"{options.replicas} replicas serve {time.monotonic() - began:.1f} s after the start of all processes")
        observed = processes_of(head.popen.pid)
        before = {name: look(process) for name, process in observed.items()}
        time.sleep(REST_S)
        report("at rest", before, observed)
        before = {name: look(process) for name, process in observed.items()}
        asyncio.run(load(options, cluster.url))
        report("under load", before, observed)


def processes_of(pid: int) -> dict[str, psutil.Process]:
    """The head, and the coordinator among its children."""
    head = psutil.Process(pid)
    found = {"head": head}
    for child in head.children(recursive=True):
        if any("coordinator" in argument for argument in child.cmdline()):
            found["coordinator"] = child
    return found


def look(process: psutil.Process) -> Usage:
    """What a process has used so far."""
    times = process.cpu_times()
    return Usage(time.monotonic(), times.user + times.system, process.memory_info().rss / MEGABYTE)


def report(when: str, before: dict[str, Usage], observed: dict[str, psutil.Process]) -> None:
    """One line per process: memory now, and share of one core since `before`."""
    for name, process in observed.items():
        now = look(process)
        share = (now.cpu_s - before[name].cpu_s) / (now.at - before[name].at)
        print(f"{when}: {name}: {now.memory_mb:.0f} MB, {share:.1%} of one core of {os.cpu_count()}")


async def load(options: argparse.Namespace, url: str) -> None:
    """Stream completions, so many at a time, and print what clients saw."""
    limits = httpx.Limits(max_connections=options.concurrency)
    places = asyncio.Semaphore(options.concurrency)
    async with httpx.AsyncClient(base_url=url, limits=limits, trust_env=False) as client:

        async def one(number: int) -> Stream:
            async with places:
                return await run_stream(client, f"Request number {number}", options.tokens)

        began = time.monotonic()
        streams = await asyncio.gather(*map(one, range(options.requests)))
        elapsed = time.monotonic() - began
    print_streams(streams, elapsed)


def print_streams(streams: Sequence[Stream], elapsed: float) -> None:
    """Rate, failures and time to the first token."""
    finished = [stream for stream in streams if not stream.error]
    failed = [stream.error for stream in streams if stream.error]
    first = [1000 * (stream.arrivals[0] - stream.started) for stream in finished if stream.arrivals]
    print(f"{len(finished) / elapsed:.1f} requests/s, {len(failed)} failed {failed[:1]}")
    if first:
        print(f"time to the first token: p50 {percentile(first, 0.5):.0f} ms, p99 {percentile(first, 0.99):.0f} ms")


if __name__ == "__main__":
    main()
