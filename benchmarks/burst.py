"""Bursts of requests of mixed lengths: the fleet's policies, vLLM's data parallelism and vllm-router, side by side.

    python benchmarks/burst.py --model DIR --router ENVIRONMENT/bin/vllm-router

Requests come in bursts (gaps of a gamma distribution with shape 0.2), and few of them are most of the work: lengths of
prompts and answers are log-normal. Who counts requests instead of work puts two long ones behind each other. The
engines sleep a modelled time instead of running a model; `--real` runs the model on two.
"""

import json
import random
import tempfile
from pathlib import Path

from processes import TOKENS_PER_WORD, WORDS
from side_by_side import Load, arguments, compare

REQUESTS_PER_ENGINE = 120
RATE_PER_ENGINE = 3.0
"""Requests per second that are offered."""
BURSTINESS = 0.2
PROMPT_TOKENS = (400.0, 1.2, 3500)
"""Median, sigma of the logarithm, and the most."""
OUTPUT_TOKENS = (40.0, 0.8, 400)


def main() -> None:
    """Run everything and write the table."""
    options = arguments(__doc__, engines=4).parse_args()
    requests = REQUESTS_PER_ENGINE * options.engines
    rate = RATE_PER_ENGINE * options.engines
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder, "requests.jsonl")
        write_requests(dataset, requests, random.Random(0))
        load = Load(
            requests,
            {
                "dataset-name": "custom",
                "dataset-path": dataset,
                "custom-output-len": -1,
                "request-rate": rate,
                "burstiness": BURSTINESS,
            },
        )
        title = f"{requests} requests of mixed lengths, {rate:g} a second offered, in bursts (shape {BURSTINESS:g})"
        compare(options, title, load, ("--max-model-len", "4096"))


def write_requests(path: Path, count: int, rng: random.Random) -> None:
    """Write the data set: prompts without a common beginning, and the lengths of their answers."""
    with path.open("w") as lines:
        for number in range(count):
            words = [f"{number}", *rng.choices(WORDS, k=int(log_normal(rng, *PROMPT_TOKENS) / TOKENS_PER_WORD))]
            row = {"prompt": " ".join(words), "output_tokens": int(log_normal(rng, *OUTPUT_TOKENS))}
            lines.write(json.dumps(row) + "\n")


def log_normal(rng: random.Random, median: float, sigma: float, most: float) -> float:
    """A sample that is at least 1."""
    return max(1.0, min(most, median * rng.lognormvariate(0.0, sigma)))


if __name__ == "__main__":
    main()
