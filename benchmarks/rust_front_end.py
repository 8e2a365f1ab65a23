"""The fleet behind vLLM's Rust front end beside what it is measured by: vLLM's own data parallelism, and SMG.

    python benchmarks/rust_front_end.py --model DIR --smg DIR --rounds 3

Needs vLLM 0.33 with `vllm-rs`, which also makes the load, and SMG (`pip install --no-deps --target DIR smg==1.13.0`).
Engines are vLLM's own but sleep 5 ms a step. The front ends of a group are up together and loaded in turns.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import uvloop
import vllm
from front_ends import ENGINES, FRONT_ENDS, HTTP, REST, Engines, Served
from load import Client
from processes import TOKENS_PER_WORD, WORDS, percentile, wait_for

Figures = dict[str, float]
Load = Callable[[Served, int], Figures]
"""Takes what is loaded, and a seed."""
STREAMS = 96
PREFIXES, PREFIX_TOKENS, CACHE_TOKENS, BLOCK = 64, 500, 24_000, 16
CONVERSATIONS_PER_S, TURNS, PAUSE_S, CONVERSATIONS_S = 16.0, 5, 1.5, 15.0


@dataclass(frozen=True)
class Group:
    """Front ends with the same engines, and what they are asked.

    Attributes:
        front_ends: keys of `FRONT_ENDS`.
        loads: by the title of their table.
    """

    engines: Engines
    front_ends: tuple[str, ...]
    loads: dict[str, Load]


def words(rng: random.Random, tokens: int) -> str:
    """About so many tokens."""
    return " ".join(rng.choices(WORDS, k=max(1, int(tokens / TOKENS_PER_WORD))))


def bench_serve(served: Served, requests: Sequence[tuple[str, int]], *flags: str) -> Figures:
    """Prompts and lengths of answers through `vllm-rs bench serve`, in this order. Times in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder, "requests.jsonl")
        rows = ({"prompt": prompt, "output_tokens": tokens} for prompt, tokens in requests)
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [str(Path(vllm.__file__).with_name("vllm-rs")), "bench", "serve", "--backend", "openai-chat"]
        command += ["--base-url", served.url, "--model", served.model, "--ignore-eos", "--temperature", "0"]
        command += ["--dataset-name", "custom", "--dataset-path", str(dataset), "--custom-output-len", "-1"]
        command += ["--disable-shuffle", "--num-prompts", str(len(requests)), "--disable-tqdm", "--no-steady-state"]
        command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--save-result"]
        command += ["--result-dir", folder, "--result-filename", "result.json", *flags]
        before = served.cpu()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        cpu = served.cpu_since(before)
        if done.returncode != 0:
            raise RuntimeError(f"vllm-rs bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result = json.loads(Path(folder, "result.json").read_text())
    completed = max(1, result["completed"])
    return {
        "req/s": result["request_throughput"],
        "TTFT mean": result["mean_ttft_ms"],
        "TTFT p50": result["median_ttft_ms"],
        "TTFT p99": result["p99_ttft_ms"],
        "inter-token p99": result["p99_itl_ms"],
        "failed": len(requests) - result["completed"],
        **{f"CPU {kind}": seconds * 1e3 / completed for kind, seconds in cpu.items()},
        "MiB": served.memory(),
    }


def unlike(count: int, tokens: Sequence[int], *flags: str) -> Load:
    """Prompts without a common beginning; lengths of answers are drawn from these."""

    def load(served: Served, seed: int) -> Figures:
        rng = random.Random(seed)
        requests = [(words(rng, 120), rng.choice(tokens)) for _ in range(count)]
        return bench_serve(served, requests, "--seed", str(seed), *flags)

    return load


def prefixes(served: Served, seed: int) -> Figures:
    """More prefixes than one cache holds, in random order, with ends of their own."""
    rng = random.Random(seed)
    shared = [words(rng, PREFIX_TOKENS) for _ in range(PREFIXES)]
    requests = [(f"{prefix} {words(rng, 50)}", 32) for prefix in shared for _ in range(24)]
    rng.shuffle(requests)
    return bench_serve(served, requests, "--max-concurrency", "48")


def conversations(served: Served, seed: int) -> Figures:
    """They begin at Poisson's times; a question comes some time after the last answer, with all that was said."""
    rng = random.Random(seed)
    client = Client(served.url, served.model, 64)

    async def run() -> None:
        at, talks = rng.expovariate(CONVERSATIONS_PER_S), []
        while at < CONVERSATIONS_S:
            later = min(8, round(rng.expovariate(1 / (TURNS - 1))))
            questions = [(rng.expovariate(1 / PAUSE_S), words(rng, 100)) for _ in range(later)]
            talks.append(client.converse([(at, words(rng, 600)), *questions]))
            at += rng.expovariate(CONVERSATIONS_PER_S)
        await asyncio.gather(*talks)

    began, before = time.monotonic(), served.cpu()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    seconds, cpu = time.monotonic() - began, served.cpu_since(before)
    times = [chat.ttft * 1e3 for chat in client.answers if not chat.error]
    return {
        "req/s": len(times) / seconds,
        "TTFT mean": statistics.mean(times),
        "TTFT p50": percentile(times, 0.5),
        "TTFT p99": percentile(times, 0.99),
        "failed": len(client.answers) - len(times),
        **{f"CPU {kind}": seconds * 1e3 / len(times) for kind, seconds in cpu.items()},
    }


def front_end_killed(served: Served, seed: int) -> Figures:
    """SIGKILL of `vllm-rs` under load. Nothing where the server would end with it."""
    if not served.name.startswith("fleet, Rust"):
        return {}
    client = Client(served.url, served.model, 32)
    prompts = [words(random.Random(number), 120) for number in range(STREAMS)]
    killed = 0.0

    async def run() -> None:
        nonlocal killed
        asking = asyncio.create_task(client.ask_all(prompts, STREAMS, 8.0))
        await asyncio.sleep(3.0)
        victim = next(process for kind, process in served.processes() if kind == HTTP)
        killed = time.monotonic()
        victim.kill()
        await asking

    asyncio.run(run())
    whole = [chat for chat in client.answers if not chat.error]
    text = {chat.question: chat.text for chat in reversed(whole)}
    first_tokens = [chat.started + chat.ttft - killed for chat in whole if chat.started > killed]
    return {
        "chats": len(client.answers),
        "cut off": len(client.answers) - len(whole),
        "refused": client.refused,
        "wrong": sum(chat.text != text[chat.question] for chat in whole),
        "served again after": min(first_tokens, default=float("inf")) * 1e3,
    }


COMPARED = ("vllm", "smg", "fleet")
CACHES = ("--num-gpu-blocks-override", str(CACHE_TOKENS // BLOCK), "--block-size", str(BLOCK), "--max-num-seqs", "16")
GROUPS = {
    "two": Group(
        Engines(2, 0.0, ("--max-num-seqs", "512")),
        (*COMPARED, "least-queue"),
        {
            "Two engines, 96 streams of 32 tokens": unlike(4000, [32], "--max-concurrency", str(STREAMS)),
            "Two engines, 1,000 streams of 32 tokens": unlike(4000, [32], "--max-concurrency", "1000"),
            "`vllm-rs` killed under 96 streams": front_end_killed,
        },
    ),
    "four": Group(
        Engines(4, 0.0001, CACHES),
        COMPARED,
        {"Four engines, 64 prefixes of 500 tokens, 24,000 cached tokens each, 48 streams": prefixes},
    ),
    "conversations": Group(
        Engines(4, 0.0001, ("--max-num-seqs", "16")), COMPARED, {"Four engines, conversations": conversations}
    ),
    "bursts": Group(
        Engines(4, 0.0, ("--max-num-seqs", "8")),
        COMPARED,
        {"Four engines, bursts, 90 a second": unlike(900, [8, 8, 8, 192], "--request-rate=90", "--burstiness=0.25")},
    ),
    "alone": Group(
        Engines(1, 0.0, ()),
        (*COMPARED, "least-queue", "remote"),
        {"One engine, one stream of 8 tokens at a time": unlike(150, [8], "--max-concurrency", "1")},
    ),
}


def answers(served: Served) -> bool:
    """Whether it answers a request."""
    body = {"model": served.model, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with suppress(OSError):
        urllib.request.urlopen(request, timeout=10).close()
        return True
    return False


def has_started(served: Served) -> bool:
    """Whether it answers, and no engine or replica is on its way any more: some front ends answer before."""
    if not (served.started[0].is_running() and answers(served)):
        return False
    before = sum(served.cpu(ENGINES, HTTP, REST).values())
    time.sleep(1.0)
    return sum(served.cpu(ENGINES, HTTP, REST).values()) - before < 0.1


def in_turns(group: Group, options: argparse.Namespace, logs: Path) -> Iterator[tuple[str, str, Figures]]:
    """Title, front end and figures of each run. Each round begins with another front end."""
    keys = [key for key in group.front_ends if key in options.front_ends]
    with ExitStack() as stack:
        up = []
        for key in keys:
            up.append(FRONT_ENDS[key](group.engines, options.model, logs, options.smg))
            stack.callback(up[-1].stop)
        for served in up:
            wait_for(partial(has_started, served), served.name)
        for number in range(options.rounds):
            for title, load in group.loads.items():
                for turn in range(len(up)):
                    served = up[(turn + number) % len(up)]
                    yield title, served.name, load(served, options.seed + number)


def main() -> None:
    """Run everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to serve")
    parser.add_argument("--smg", type=Path, default=Path(), help="folder that SMG was installed into")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first round's load; each further round takes the next"
    )
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=[*GROUPS])
    parser.add_argument("--front-ends", nargs="*", choices=[*FRONT_ENDS], default=[*FRONT_ENDS])
    parser.add_argument("--runs", type=Path, help="JSON lines to add the runs to; the tables are of all")
    options = parser.parse_args()
    options.model = options.model.resolve()
    # An end by SIGTERM ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        store = options.runs or Path(folder, "runs.jsonl")
        for name in options.groups:
            logs = Path(folder, name)
            logs.mkdir()
            for run in in_turns(GROUPS[name], options, logs):
                print(*run, f"load average {os.getloadavg()[0]:.1f}", flush=True)
                with store.open("a") as lines:
                    lines.write(json.dumps(run) + "\n")
        runs = [tuple(json.loads(line)) for line in store.read_text().splitlines()]
    print(tables(runs))


def tables(runs: Sequence[tuple[str, str, Figures]]) -> str:
    """One for each load: medians, and all rounds behind them."""
    lines = [f"{os.cpu_count()} cores ({platform.machine()}), vLLM {version('vllm')}. Times in milliseconds."]
    for title, of_title in itertools.groupby(sorted(runs, key=lambda run: run[0]), key=lambda run: run[0]):
        rows: dict[str, list[Figures]] = {}
        for _, name, figures in of_title:
            if figures:
                rows.setdefault(name, []).append(figures)
        columns = list(dict.fromkeys(column for rounds in rows.values() for figures in rounds for column in figures))
        lines += ["", f"## {title}", "", f"| front end | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        for name, rounds in rows.items():
            cells = [cell([figures[column] for figures in rounds]) for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def cell(values: Sequence[float]) -> str:
    """The median, and all of them in the order of the rounds."""
    whole = not any(value % 1 for value in values) or max(values) >= 100
    form = ",.0f" if whole else ".1f" if max(values) >= 10 else ".2f"
    each = f" ({', '.join(format(value, form) for value in values)})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{each}"


if __name__ == "__main__":
    main()
