"""Streams while replicas are killed: how many are lost, how many are wrong, how long they pause, and what is left.

    python benchmarks/failover.py --model DIR --seconds 150 --kill-every 5 --replicas 4 [--rust] [--engines]

Every few seconds one replica's process gets SIGKILL and is started again. Each text is compared with that of an
uninterrupted run of the same prompt. With simulated replicas by default, which compute prompts at once, so that a pause
is what finding the loss and moving take; `--engines` uses real ones. With `--seconds 3600` it is a soak: at rest the
head must hold as much after the run as before.
"""

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from pathlib import Path

import psutil
from load import Answer, Client
from processes import MODEL_NAME, Cluster, Process, free_port, percentile, total, wait_for

SIMULATED = ("--tokens-per-second", "50", "--prefill-tokens-per-second", "1000000")
REFERENCE_S = 15.0
"""Of streams without a kill, in which each prompt must be answered once."""
SETTLE_S = 6.0
"""Until the server has closed idle connections."""


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--engines", action="store_true", help="real engines instead of simulated ones")
    parser.add_argument("--rust", action="store_true", help="behind vLLM's Rust front end")
    options = parser.parse_args()
    admin = free_port()
    with tempfile.TemporaryDirectory() as logs, Cluster(options.model, Path(logs)) as cluster:
        environment = {"VLLM_USE_RUST_FRONTEND": "1"} if options.rust else {}
        where = ("--omni-admin-port", str(admin)) if options.rust else ()
        head = cluster.head("--omni-dp-size-local", "0", "--omni-migration-limit", "20", *where, **environment)
        metrics = f"http://127.0.0.1:{admin}" if options.rust else cluster.url
        victims = [start(cluster, options) for _ in range(options.replicas)]
        wait_for(lambda: head.is_running() and _replicas_up(metrics) >= options.replicas, "the replicas")
        cluster.wait_until_healthy()
        asyncio.run(measure(options, cluster, metrics, head, victims))


def start(cluster: Cluster, options: argparse.Namespace) -> Process:
    """A process with one replica."""
    return cluster.node() if options.engines else cluster.sim(*SIMULATED)


async def measure(
    options: argparse.Namespace, cluster: Cluster, metrics: str, head: Process, victims: list[Process]
) -> None:
    """The reference run, then the run with kills."""
    client = Client(cluster.url, MODEL_NAME, options.tokens)
    prompts = [f"Tell the story number {number} to its end" for number in range(options.streams)]
    await client.ask_all(prompts, options.streams, REFERENCE_S)
    reference = {answer.question: answer.text for answer in client.answers if not answer.error}
    client.answers.clear()
    await asyncio.sleep(SETTLE_S)
    before = held(head)
    killed: list[float] = []
    killing = asyncio.create_task(keep_killing(options, cluster, victims, killed))
    await client.ask_all(prompts, options.streams, options.seconds)
    killing.cancel()
    await asyncio.wait([killing])
    await asyncio.sleep(SETTLE_S)
    report(client.answers, reference, len(killed), int(total(metrics, "vllm_omni_fleet:request_moves_total")))
    print(f"\nHeld by the head at rest before and after: {before}; {held(head)}.")


async def keep_killing(
    options: argparse.Namespace, cluster: Cluster, victims: list[Process], killed: list[float]
) -> None:
    """Kill one replica after the other, start each again, and note the times.

    On a busy machine a start may take longer than a round: neither a replica that does not serve yet is killed, nor the
    last one that does.
    """
    starting: dict[int, asyncio.Task[None]] = {}
    for turn in itertools.cycle(range(len(victims))):
        await asyncio.sleep(options.kill_every)
        await asyncio.gather(*(starting.pop(i) for i in (turn, (turn + 1) % len(victims)) if i in starting))
        await asyncio.to_thread(victims[turn].kill)
        killed.append(time.monotonic())
        victims[turn] = start(cluster, options)
        starting[turn] = asyncio.create_task(start_behind_the_others(victims[turn]))


async def start_behind_the_others(process: Process) -> None:
    """Let a process start at the lowest priority: elsewhere it would take no time from those that serve. Needs root."""
    os.setpriority(os.PRIO_PGRP, process.popen.pid, 19)
    await asyncio.to_thread(wait_for, lambda: "serves at" in process.log.read_text(), "a replica is back")
    os.setpriority(os.PRIO_PGRP, process.popen.pid, 0)


def held(head: Process) -> str:
    """What the head's own process holds."""
    process = psutil.Process(head.popen.pid)
    memory = process.memory_full_info().uss / 2**20
    return f"{memory:.1f} MiB, {process.num_fds()} open files, {process.num_threads()} threads"


def report(answers: list[Answer], reference: dict[str, str], kills: int, moves: int) -> None:
    """Print one table."""
    lost = [answer for answer in answers if answer.error]
    wrong = [answer for answer in answers if not answer.error and answer.text != reference[answer.question]]
    gaps = sorted((answer.longest_gap for answer in answers), reverse=True)
    moved = gaps[:moves] or [0.0]
    print("| streams | kills | moves | lost | wrong | longest pause of a stream, ms | of those that moved |")
    print("|---:|---:|---:|---:|---:|---|---|")
    print(
        f"| {len(answers)} | {kills} | {moves} | {len(lost)} | {len(wrong)} "
        f"| p50 {percentile(gaps, 0.5) * 1e3:.0f}, p99 {percentile(gaps, 0.99) * 1e3:.0f} "
        f"| p50 {percentile(moved, 0.5) * 1e3:.0f}, p99 {percentile(moved, 0.99) * 1e3:.0f} |"
    )
    for answer in lost[:5]:
        print("lost:", answer.error)
    for answer in wrong[:3]:
        print("wrong:", repr(answer.text[:80]), "expected", repr(reference[answer.question][:80]))


def _replicas_up(metrics: str) -> float:
    try:
        return total(metrics, "vllm_omni_fleet:replicas", 'state="up"')
    except OSError:
        # A head on a busy machine may take longer than the time limit for its metrics.
        return 0.0


if __name__ == "__main__":
    main()
