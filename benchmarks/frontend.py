"""What several API servers bring: throughput, who needs the processor, and what the death of one costs.

    python benchmarks/frontend.py --model DIR --rounds 2 --out benchmarks/results/frontend.md

Engines are vLLM's own but sleep a few milliseconds for each step, so that what is in front of them is the limit. Every
set-up gets one stream at a time, then as many streams as keep it busy; where there are several API servers one of them
is killed under that load. The load generator and the server share the machine, which may be the limit sooner than the
API servers are: the table says who used how much of it. Compare set-ups of equal size with each other only.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import uvloop
from load import Answer, Load
from processes import COMMON, percentile, start_server, wait_for
from server_processes import API_SERVER, ApiServers, Cores, cores_between
from setups import sleeping

TOKENS = 32
WARM_UP_S = 4.0
ALONE_S = 6.0
KILL_AFTER_S, WATCH_S = 3.0, 40.0


@dataclass(frozen=True)
class Setup:
    """One way to serve two engines, or one.

    Attributes:
        args: of `vllm serve`.
        api_servers: how many processes answer HTTP.
    """

    name: str
    args: tuple[str, ...]
    api_servers: int


def _fleet(api_servers: int) -> Setup:
    args = ("--omni-dp-size-local", "2", "--api-server-count", str(api_servers))
    return Setup(f"fleet, API servers: {api_servers}", args, api_servers)


def _vllm(api_servers: int) -> Setup:
    args = ("--data-parallel-size", "2", "--api-server-count", str(api_servers))
    return Setup(f"vLLM --data-parallel-size 2, API servers: {api_servers}", args, api_servers)


SETUPS = (_fleet(1), _fleet(2), _fleet(4), _vllm(1), _vllm(2), _vllm(4), Setup("vLLM, one engine", (), 1))


@dataclass(frozen=True)
class Run:
    """One set-up in one round. Times in milliseconds.

    Attributes:
        requests, tokens: per second.
        ttft_p50, ttft_p99: time to first token with all streams.
        alone_p50, alone_p99: with one.
        failed: requests that failed, of all.
        events: pieces in which an answer's tokens came, mean.
        cores: cores in use, by what a process is: the sum, and the busiest.
        kill: what the death of an API server came to, or "".
    """

    setup: str
    requests: float
    tokens: float
    ttft_p50: float
    ttft_p99: float
    alone_p50: float
    alone_p99: float
    failed: int
    events: float
    cores: dict[str, Cores]
    kill: str


def main() -> None:
    """Run everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to serve")
    parser.add_argument("--setups", nargs="*", type=int, default=range(len(SETUPS)), help="numbers, from 0")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--streams", type=int, default=96, help="at a time")
    parser.add_argument("--seconds", type=float, default=15.0, help="that are measured")
    parser.add_argument("--step", type=float, default=0.005, help="seconds that an engine sleeps for each step")
    parser.add_argument("--runs", type=Path, default=None, help="JSON lines to add the runs to; the tables are of all")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file to write beside printing")
    options = parser.parse_args()
    # An end by SIGTERM ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        store = options.runs or Path(folder, "runs.jsonl")
        for _ in range(options.rounds):
            for number in options.setups:
                run = serve_and_measure(SETUPS[number], options, Path(folder, f"{number}.log"))
                print(run, flush=True)
                with store.open("a") as lines:
                    lines.write(json.dumps(vars(run)) + "\n")
        runs = [Run(**json.loads(line)) for line in store.read_text().splitlines()]
    tables = report(options, runs)
    print(tables)
    if options.out is not None:
        options.out.write_text(tables)


def serve_and_measure(setup: Setup, options: argparse.Namespace, log: Path) -> Run:
    """Start a set-up, load it, and end it."""
    times = {"step_s": options.step, "prefill_token_s": 0.0, "sequence_s": 0.0}
    args = (str(options.model), *COMMON, "--disable-uvicorn-access-log", *sleeping(times), *setup.args)
    process, url = start_server("server", args, log, VLLM_LOGGING_LEVEL="WARNING")
    try:
        servers = ApiServers(process.popen.pid, url, setup.api_servers)
        wait_for(lambda: process.is_running() and servers.all_answer(), setup.name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(setup, servers, options.streams, options.seconds))
    finally:
        process.stop()


async def measure(setup: Setup, servers: ApiServers, streams: int, seconds: float) -> Run:
    """All phases of one set-up."""
    await Load(servers.url, 2 * setup.api_servers, TOKENS).run(1.0)
    alone = Load(servers.url, 1, TOKENS)
    await alone.run(ALONE_S)
    load = Load(servers.url, streams, TOKENS)
    running = asyncio.create_task(load.run(WARM_UP_S + seconds))
    await asyncio.sleep(WARM_UP_S)
    began, before = time.monotonic(), servers.cpu_times()
    await asyncio.sleep(seconds)
    ended, after = time.monotonic(), servers.cpu_times()
    await running
    answers = [answer for answer in load.answers if began <= answer.ended < ended]
    done = sum(not answer.error for answer in answers) / (ended - began)
    return Run(
        setup.name,
        done,
        done * TOKENS,
        *_ttft(answers),
        *_ttft(alone.answers),
        failed=sum(bool(answer.error) for answer in load.answers + alone.answers) + load.refused + alone.refused,
        events=statistics.mean(answer.events for answer in answers),
        cores=cores_between(before, after, ended - began),
        kill=await kill_one(servers, streams) if setup.api_servers == 2 else "",
    )


def _ttft(answers: Sequence[Answer]) -> tuple[float, float]:
    times = [(answer.first - answer.started) * 1e3 for answer in answers if answer.first] or [0.0]
    return percentile(times, 0.5), percentile(times, 0.99)


async def kill_one(servers: ApiServers, streams: int) -> str:
    """SIGKILL one of the API servers under load; what came of it, in words."""
    load = Load(servers.url, streams, TOKENS)
    running = asyncio.create_task(load.run(KILL_AFTER_S + WATCH_S))
    await asyncio.sleep(KILL_AFTER_S)
    victim = servers.processes()[-1]
    own = servers.client_ports(victim)
    known = {process.pid for process in servers.processes()}
    killed = time.monotonic()
    victim.kill()
    end = await asyncio.to_thread(wait_for_successor, servers, known, killed)
    running.cancel()
    await asyncio.wait([running])
    failed = [answer for answer in load.answers if answer.error]
    others = [answer for answer in load.answers if answer.port not in own and answer.ended > killed]
    pause = max((answer.longest_gap for answer in others if not answer.error), default=0.0)
    return (
        f"{len(own)} of {streams} connections were to it; {sum(answer.port in own for answer in failed)} requests "
        f"failed on these and {sum(answer.port not in own for answer in failed)} on others; "
        f"{load.refused} connections were refused; "
        f"longest pause of another stream {pause * 1e3:.0f} ms; {end}"
    )


def wait_for_successor(servers: ApiServers, known: set[int], killed: float) -> str:
    """Until another process takes requests in its place, or the whole server has ended; says which, and when."""
    while time.monotonic() < killed + WATCH_S:
        if not psutil.pid_exists(servers.pid) or psutil.Process(servers.pid).status() == psutil.STATUS_ZOMBIE:
            return f"the server had ended after {time.monotonic() - killed:.1f} s"
        if servers.answered_by_new(known):
            return f"a successor served after {time.monotonic() - killed:.1f} s"
        time.sleep(0.1)
    return f"no successor served within {WATCH_S:.0f} s"


def report(options: argparse.Namespace, runs: Sequence[Run]) -> str:
    """The tables, in Markdown."""
    kinds = sorted({kind for run in runs for kind in run.cores})
    names = ("req/s", "tokens/s", "TTFT p50", "TTFT p99", "alone: TTFT p50", "p99", "failed", "events", "CPU", *kinds)
    lines = ["| set-up | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for run in sorted(runs, key=lambda run: [setup.name for setup in SETUPS].index(run.setup)):
        cells = [f"{run.requests:.1f}", f"{run.tokens:,.0f}", f"{run.ttft_p50:.0f}", f"{run.ttft_p99:.0f}"]
        cells += [f"{run.alone_p50:.1f}", f"{run.alone_p99:.1f}", str(run.failed), f"{run.events:.1f}"]
        cells.append(f"{Cores(*run.cores[API_SERVER]).total * 1e3 / run.requests:.1f}")
        cells += [str(Cores(*run.cores[kind])) if kind in run.cores else "" for kind in kinds]
        lines.append(f"| {run.setup} | " + " | ".join(cells) + " |")
    kills = [f"- {run.setup}: {run.kill}." for run in runs if run.kill]
    machine = (
        f"{options.streams} streams at a time, {TOKENS} tokens each, engines that sleep {options.step * 1e3:g} ms "
        f"a step. {os.cpu_count()} cores ({platform.machine()}), vLLM {version('vllm')}. Times in milliseconds. "
        "Events: in which an answer's tokens came. CPU: of the API servers, for one request. Of every kind of process: "
        "cores in use, of all its processes (of the busiest)."
    )
    return "\n".join([machine, "", *lines, "", *kills, ""])


if __name__ == "__main__":
    main()
