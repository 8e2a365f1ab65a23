"""Streams while replicas are killed: how many are lost, how many are wrong, and how long they pause.

    python benchmarks/failover.py --model DIR --requests 1000 --kill-every 5 --replicas 4 [--engines]

Every request streams; every few seconds one replica's process gets SIGKILL and is started again. Each text is compared
with that of an uninterrupted run of the same prompt. With simulated replicas by default, because a real engine takes
half a minute to come back on a small machine; `--engines` uses real ones.
"""

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from pathlib import Path

import httpx
from processes import Cluster, Process, percentile, wait_for
from streams import Stream, run_stream


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--engines", action="store_true", help="real engines instead of simulated ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs, Cluster(options.model, Path(logs)) as cluster:
        cluster.head("--omni-dp-size-local", "0", "--omni-migration-limit", "20")
        start = cluster.node if options.engines else cluster.sim
        victims = [start() for _ in range(options.replicas)]
        cluster.wait_until_healthy()
        cluster.wait_for_replicas(options.replicas)
        asyncio.run(measure(options, cluster, victims))


async def measure(options: argparse.Namespace, cluster: Cluster, victims: list[Process]) -> None:
    """The reference run, then the run with kills."""
    prompts = [f"Tell the story number {number} to its end" for number in range(options.prompts)]
    limits = httpx.Limits(max_connections=options.concurrency + 4)
    async with httpx.AsyncClient(base_url=cluster.url, limits=limits, trust_env=False) as client:
        reference = {s.prompt: s.text for s in await run_all(client, prompts, options.concurrency, options.tokens)}
        before = cluster.metric("vllm_omni_fleet:request_moves_total")
        killed: list[float] = []
        killing = asyncio.create_task(keep_killing(options, cluster, victims, killed))
        wanted = list(itertools.islice(itertools.cycle(prompts), options.requests))
        began = time.monotonic()
        streams = await run_all(client, wanted, options.concurrency, options.tokens)
        elapsed = time.monotonic() - began
        killing.cancel()
    moves = int(cluster.metric("vllm_omni_fleet:request_moves_total") - before)
    report(streams, reference, len(killed), moves, elapsed)


async def run_all(client: httpx.AsyncClient, prompts: list[str], concurrency: int, tokens: int) -> list[Stream]:
    """Stream all prompts, so many at a time."""
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: str) -> Stream:
        async with places:
            return await run_stream(client, prompt, tokens)

    return await asyncio.gather(*map(one, prompts))


async def keep_killing(
    options: argparse.Namespace, cluster: Cluster, victims: list[Process], killed: list[float]
) -> None:
    """Kill one replica after the other, start each again, and note the times.

    On a busy machine a start may take longer than a round: neither a replica that does not serve yet is killed, nor the
    last one that does.
    """
    start = cluster.node if options.engines else cluster.sim
    starting: dict[int, asyncio.Task[None]] = {}
    for turn in itertools.cycle(range(len(victims))):
        await asyncio.sleep(options.kill_every)
        await asyncio.gather(*(starting.pop(i) for i in (turn, (turn + 1) % len(victims)) if i in starting))
        await asyncio.to_thread(victims[turn].kill)
        killed.append(time.monotonic())
        victims[turn] = start()
        starting[turn] = asyncio.create_task(start_behind_the_others(victims[turn]))


async def start_behind_the_others(process: Process) -> None:
    """Let a process start at the lowest priority: elsewhere it would take no time from those that serve. Needs root."""
    os.setpriority(os.PRIO_PGRP, process.popen.pid, 19)
    await asyncio.to_thread(wait_for, lambda: "serves at" in process.log.read_text(), "a replica is back")
    os.setpriority(os.PRIO_PGRP, process.popen.pid, 0)


def report(streams: list[Stream], reference: dict[str, str], kills: int, moves: int, elapsed: float) -> None:
    """Print one table."""
    lost = [stream for stream in streams if stream.error]
    wrong = [stream for stream in streams if not stream.error and stream.text != reference[stream.prompt]]
    gaps = sorted((stream.longest_gap for stream in streams), reverse=True)
    moved = gaps[:moves] or [0.0]
    print("| requests | kills | moves | lost | wrong | longest pause of a stream, ms | of those that moved | req/s |")
    print("|---:|---:|---:|---:|---:|---|---|---:|")
    print(
        f"| {len(streams)} | {kills} | {moves} | {len(lost)} | {len(wrong)} "
        f"| p50 {percentile(gaps, 0.5) * 1e3:.0f}, p99 {percentile(gaps, 0.99) * 1e3:.0f} "
        f"| p50 {percentile(moved, 0.5) * 1e3:.0f}, p99 {percentile(moved, 0.99) * 1e3:.0f} "
        f"| {len(streams) / elapsed:.1f} |"
    )
    for stream in lost[:5]:
        print("lost:", stream.error)
    for stream in wrong[:3]:
        print("wrong:", repr(stream.text[:80]), "expected", repr(reference[stream.prompt][:80]))


if __name__ == "__main__":
    main()
