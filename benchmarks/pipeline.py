"""What a pipeline costs and gains: against separate `vllm serve` processes that an HTTP client chains.

    python benchmarks/pipeline.py hops --stages 2 --requests 100
    python benchmarks/pipeline.py speech --requests 25

All set-ups are up together and are asked the same prompts in turns, so that all see the same machine. The engines are
vLLM's own, but sleep so many seconds for each step (--step), so that what differs is the way between them and not which
had a core to itself; with --real they run the tiny models of `examples/pipelines`.
"""

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import aiohttp
from pipeline_clients import Answer, Client, SpeechChain, SpeechPipeline, TextChain, TextPipeline, as_it_is, refine
from pipeline_servers import Servers, Stages, engine_seconds
from processes import percentile
from setups import sleeping

WARM_UP = 8
TOKENS = 8
"""Of each stage's answer in a chain of texts."""
THOUGHT, CODES_PER_TOKEN = 32, 4
"""Of speech: tokens of the thinker's text, and codec tokens for each."""
CODES = {"allowed_token_ids": list(range(257, 257 + 128))}
"""Has a talker that only sleeps answer with codec tokens."""
Answers = dict[str, list[Answer]]


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hops", "speech"))
    parser.add_argument("--stages", type=int, choices=(2, 3), default=2, help="of the chain of texts")
    parser.add_argument("--requests", type=int, default=100, help="to each set-up, for each load")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="loads: requests under way at a time")
    parser.add_argument("--step", type=float, default=0.01, help="seconds that each step of an engine sleeps")
    parser.add_argument("--real", action="store_true", help="run the models instead of sleeping")
    options = parser.parse_args()
    # An end by SIGTERM ends what was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    engine_args = () if options.real else sleeping({"step_s": options.step})
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder), engine_args) as servers:
        measure = measure_hops if options.what == "hops" else measure_speech
        print(machine(options.real, options.step))
        measure(servers, options)
        print(f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.")


def measure_hops(servers: Servers, options: argparse.Namespace) -> None:
    """Texts through two or three models."""
    stages = text_stages(servers.example("refiner"), options.stages)
    url = servers.pipeline("pipeline", stages)
    plain = [servers.plain(stage) for stage in stages]
    chain = TextChain(plain, TOKENS, [refine, as_it_is][: options.stages - 1])
    servers.wait()
    clients: dict[str, Client] = {"one pipeline": TextPipeline(url, TOKENS), "HTTP chain": chain}
    asyncio.run(ask_all(clients, WARM_UP, WARM_UP, ()))
    for width in options.at_once:
        answers, engines = asyncio.run(ask_all(clients, options.requests, width, plain[1:] if width == 1 else ()))
        report(f"{options.stages} stages, {width} at a time", answers)
        same = sum(a.output == b.output for a, b in zip(*answers.values(), strict=True))
        print(f"\nThe same text from both: {same} of {options.requests}.")
        report_hops(answers, [stage["name"] for stage in stages[1:]], engines)


def measure_speech(servers: Servers, options: argparse.Namespace) -> None:
    """Sound from text, with and without chunks."""
    talk = {} if options.real else CODES
    stages = speech_stages(servers.example("speech"), talk)
    chunks = servers.pipeline("chunks", stages)
    whole = servers.pipeline("whole", [without_chunks(stage) for stage in stages])
    thinker, talker = (servers.plain(stage) for stage in stages[:2])
    servers.wait()
    codes = THOUGHT * CODES_PER_TOKEN
    clients: dict[str, Client] = {
        "pipeline, chunks": SpeechPipeline(chunks),
        "pipeline, whole outputs": SpeechPipeline(whole),
        "HTTP chain, codes streamed": SpeechChain(thinker, talker, THOUGHT, codes, talk, chunks=True),
        "HTTP chain, whole outputs": SpeechChain(thinker, talker, THOUGHT, codes, talk, chunks=False),
    }
    asyncio.run(ask_all(clients, 2, 1, ()))
    for width in options.at_once:
        answers, _ = asyncio.run(ask_all(clients, options.requests, width, ()))
        report(f"Speech, {width} at a time", answers)
        lengths = {name: sorted({len(answer.output) for answer in own}) for name, own in answers.items()}
        print(f"\nBytes of sound: {lengths}.")


def text_stages(example: Stages, count: int) -> Stages:
    """The example `refiner`, and a second refiner behind it if there shall be three."""
    thinker, refiner = example
    for stage in example[: count - 1]:
        stage["sampling"] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    if count == 2:
        return example
    editor = {**refiner, "id": 2, "name": "editor", "inputs": ["refiner"]}
    del editor["transform"], editor["sampling"]
    return [thinker, {**refiner, "final": False}, editor]


def speech_stages(example: Stages, talk: Mapping[str, object]) -> Stages:
    """The example `speech`, whose thinker's text is for the talker only."""
    thinker, talker, vocoder = example
    thinker |= {"final": False, "sampling": {"temperature": 0, "max_tokens": THOUGHT, "ignore_eos": True}}
    talker["sampling"] = {**talker["sampling"], "ignore_eos": True, **talk}
    return [thinker, talker, vocoder]


def without_chunks(stage: Mapping[str, object]) -> dict[str, object]:
    """The same stage, waiting for whole inputs."""
    return {key: value for key, value in stage.items() if key not in ("async_chunk", "chunk_size")}


async def ask_all(
    clients: Mapping[str, Client], requests: int, width: int, timed: Sequence[str]
) -> tuple[Answers, list[float]]:
    """Ask everybody the same, in turns.

    Args:
        clients: by set-up.
        requests: to each.
        width: how many are under way at a time.
        timed: servers whose engines' time is read after each turn of the last client, one request being a turn.

    Returns:
        The answers; and the engines' seconds of each turn, if any are timed.
    """
    answers: Answers = {name: [] for name in clients}
    seconds: list[float] = []
    prompts = [f"Question {number}: how many stages are there?" for number in range(requests)]
    batch = 1 if width == 1 else 4 * width
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        for turn, at in enumerate(range(0, requests, batch)):
            before = sum(map(engine_seconds, timed))
            # Whoever is second in one turn is first in the next.
            for name in list(clients)[:: 1 if turn % 2 else -1]:
                answers[name] += await _ask_batch(session, clients[name], prompts[at : at + batch], width)
            if timed:
                seconds.append(sum(map(engine_seconds, timed)) - before)
    return answers, seconds


async def _ask_batch(
    session: aiohttp.ClientSession, client: Client, prompts: Sequence[str], width: int
) -> list[Answer]:
    room = asyncio.Semaphore(width)

    async def ask(prompt: str) -> Answer:
        async with room:
            return await client.ask(session, prompt)

    return await asyncio.gather(*map(ask, prompts))


def report(title: str, answers: Answers) -> None:
    """Print what clients saw, in milliseconds."""
    print(f"\n{title}:\n\n| set-up | requests | first p50 | first p99 | end to end p50 | end to end p99 |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, own in answers.items():
        print(f"| {name} | {len(own)} | {_cells([a.first for a in own])} | {_cells([a.whole for a in own])} |")


def report_hops(answers: Answers, behind: Sequence[str], engines: Sequence[float]) -> None:
    """Print what each hop adds besides the engines, in milliseconds.

    Args:
        answers: of the pipeline and of the chain.
        behind: stages that others are in front of.
        engines: seconds that the chain's engines behind the first one took for each request.
    """
    piped, chained = answers.values()
    print("\n| added by a hop | p50 | p99 |\n|---|---:|---:|")
    for part in ("transfer", "queue"):
        print(
            f"| pipeline, by its own clocks: {part} | {_cells([a.timings[s][part] for a in piped for s in behind])} |"
        )
    if engines:
        hops = len(behind)
        rows = list(zip(piped, chained, engines, strict=True))
        print(f"| pipeline, by the client's | {_cells([(p.whole - c.calls[0] - e) / hops for p, c, e in rows])} |")
        print(f"| HTTP chain, by the client's | {_cells([(c.whole - c.calls[0] - e) / hops for _, c, e in rows])} |")
        print(f"| pipeline, less the chain's | {_cells([(p.whole - c.whole) / hops for p, c, _ in rows])} |")


def machine(real: bool, step: float) -> str:
    """What the figures come from."""
    engines = "that run their models" if real else f"that sleep {step * 1e3:g} ms for each step"
    return (
        f"vLLM {version('vllm')}, engines {engines}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}; load of the machine before: {os.getloadavg()[0]:.1f}. Milliseconds."
    )


def _cells(seconds: Sequence[float]) -> str:
    values = [value * 1e3 for value in seconds]
    return f"{percentile(values, 0.5):.2f} | {percentile(values, 0.99):.2f}"


if __name__ == "__main__":
    main()
