"""Processor time of several API servers by thread: fleet, vLLM's own, and vLLM's with a thread for its sockets.

    python benchmarks/threads.py --model DIR

The last one does nothing but hand over what comes: it shows what a second thread costs by itself. All set-ups are up at
once and loaded in turns, since only what ran within the same minutes compares. Figures are the middle of all turns.
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
from load import Load
from processes import COMMON, STARTUP, Process, start_server, wait_for
from server_processes import ApiServers
from setups import sleeping

sys.path.append(str(STARTUP))

from measured_threads import NAME, READING, VARIABLE

API_SERVERS = 2
TOKENS = 32
WARM_UP_S = 1.0
_MAIN, _OTHERS = "AsyncLLM's loop", "others"
_KINDS = {
    "omni-orchestrat": "orchestrator",
    NAME: "socket thread",
    "ThreadPoolExecu": "tokenizer",
    "ZMQbg": "libzmq",
    "omni-head-clien": "session",
}
"""By how threads' names begin."""
_COLUMNS = (_MAIN, *_KINDS.values(), _OTHERS)
_FLEET = ("--omni-dp-size-local", "2", "--api-server-count", str(API_SERVERS))
_VLLM = ("--data-parallel-size", "2", "--api-server-count", str(API_SERVERS))
SETUPS = {
    "vLLM --data-parallel-size 2": (_VLLM, "1"),
    "vLLM --data-parallel-size 2, a thread for its sockets": (_VLLM, READING),
    "fleet": (_FLEET, "1"),
}
"""Arguments, and what `measured_threads.VARIABLE` says."""


@dataclass(frozen=True)
class Turn:
    """One set-up under load for a few seconds. For each request, by kind of thread.

    Attributes:
        cpu_ms: processor time in milliseconds.
        waits: how often such a thread gave the processor up of itself.
        requests: per second.
        ttft_ms: median time to the first token.
        events: pieces in which an answer came, mean.
    """

    cpu_ms: dict[str, float]
    waits: dict[str, float]
    requests: float
    ttft_ms: float
    events: float


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to serve")
    parser.add_argument("--turns", type=int, default=9, help="of each set-up")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn that are measured")
    parser.add_argument("--streams", type=int, default=96, help="at a time")
    options = parser.parse_args()
    # An end by SIGTERM ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    turns: dict[str, list[Turn]] = {name: [] for name in SETUPS}
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with ExitStack() as stack, runner:
        servers = _start(options.model, stack)
        for turn in range(options.turns):
            for name in list(servers) if turn % 2 == 0 else reversed(servers):
                turns[name].append(runner.run(measure(servers[name], options.streams, options.seconds)))
    print(report(turns))


def _start(model: Path, stack: ExitStack) -> dict[str, ApiServers]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    times = sleeping({"step_s": 0.005, "prefill_token_s": 0.0, "sequence_s": 0.0})
    servers: dict[str, ApiServers] = {}
    ready = []
    for name, (args, threads) in SETUPS.items():
        command = (str(model), *COMMON, "--disable-uvicorn-access-log", *times, *args)
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", VARIABLE: threads}
        process, url = start_server(name, command, folder / f"{len(servers)}.log", **environment)
        stack.callback(process.stop)
        server = servers[name] = ApiServers(process.popen.pid, url, API_SERVERS)
        ready.append(partial(_answers, process, server))
    for name, answers in zip(servers, ready, strict=True):
        wait_for(answers, name)
    return servers


def _answers(process: Process, servers: ApiServers) -> bool:
    return process.is_running() and servers.all_answer()


async def measure(servers: ApiServers, streams: int, seconds: float) -> Turn:
    """Load one set-up."""
    load = Load(servers.url, streams, TOKENS)
    running = asyncio.create_task(load.run(WARM_UP_S + seconds))
    await asyncio.sleep(WARM_UP_S)
    began, before = time.monotonic(), _threads(servers)
    await asyncio.sleep(seconds)
    ended, after = time.monotonic(), _threads(servers)
    await running
    answers = [answer for answer in load.answers if began <= answer.ended < ended and not answer.error]
    cpu_ms, waits = defaultdict[str, float](float), defaultdict[str, float](float)
    for thread in before.keys() & after.keys():
        kind, cpu, waited = after[thread]
        cpu_ms[kind] += (cpu - before[thread][1]) / len(answers)
        waits[kind] += (waited - before[thread][2]) / len(answers)
    ttft_ms = statistics.median((answer.first - answer.started) * 1e3 for answer in answers)
    events = statistics.mean(answer.events for answer in answers)
    return Turn(cpu_ms, waits, len(answers) / (ended - began), ttft_ms, events)


def _threads(servers: ApiServers) -> dict[str, tuple[str, float, int]]:
    """Kind, processor time in milliseconds and waits of each thread of the API servers, by its folder in /proc."""
    threads = {}
    for process in servers.processes():
        for folder in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(OSError):
                name = (folder / "comm").read_text()
                kind = next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), _OTHERS)
                cpu_ms = int((folder / "schedstat").read_text().split()[0]) / 1e6
                lines = (folder / "status").read_text().splitlines()
                waits = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
                threads[str(folder)] = _MAIN if folder.name == str(process.pid) else kind, cpu_ms, waits
    return threads


def report(turns: dict[str, list[Turn]]) -> str:
    """The table, in Markdown."""
    names = ("all", "of turns", *_COLUMNS, "req/s", "TTFT p50", "events per answer")
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for name, of_setup in turns.items():
        sums = [sum(turn.cpu_ms.values()) for turn in of_setup]
        cells = [f"{statistics.median(sums):.2f}", f"{min(sums):.2f}-{max(sums):.2f}"]
        for kind in _COLUMNS:
            cpu_ms = statistics.median(turn.cpu_ms.get(kind, 0.0) for turn in of_setup)
            waits = statistics.median(turn.waits.get(kind, 0.0) for turn in of_setup)
            cells.append(f"{cpu_ms:.3f} ({waits:.1f})" if cpu_ms else "")
        cells.append(f"{statistics.median(turn.requests for turn in of_setup):.0f}")
        cells.append(f"{statistics.median(turn.ttft_ms for turn in of_setup):.0f}")
        cells.append(f"{statistics.median(turn.events for turn in of_setup):.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
