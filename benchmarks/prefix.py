"""Prompts that share prefixes: the fleet's policies, vLLM's data parallelism and vllm-router, side by side.

    python benchmarks/prefix.py --model DIR --router ENVIRONMENT/bin/vllm-router

Long prefixes come again with other ends, in random order. One engine's cache holds a part of them, all caches together
hold them all: who sends a prefix back to where it is cached computes little but the ends. The engines sleep a modelled
time instead of running a model (`tests/fakes/sleeping_executor.py`), so that several of them do not compete for the
cores; `--real` runs the model on two.
"""

from side_by_side import Load, arguments, block_size, compare

PREFIX_TOKENS = 2048
SUFFIX_TOKENS = 64
OUTPUT_TOKENS = 16
PREFIXES_PER_ENGINE = 16
REQUESTS_PER_PREFIX = 8
AT_A_TIME_PER_ENGINE = 4
ROOM = 1.5
"""The KV memory of an engine, as a multiple of what its share of the prefixes takes: the rest is for what runs."""


def main() -> None:
    """Run everything and write the table."""
    options = arguments(__doc__, engines=8).parse_args()
    prefixes = PREFIXES_PER_ENGINE * options.engines
    at_a_time = AT_A_TIME_PER_ENGINE * options.engines
    load = Load(
        prefixes * REQUESTS_PER_PREFIX,
        {
            "dataset-name": "prefix_repetition",
            "prefix-repetition-num-prefixes": prefixes,
            "prefix-repetition-prefix-len": PREFIX_TOKENS,
            "prefix-repetition-suffix-len": SUFFIX_TOKENS,
            "prefix-repetition-output-len": OUTPUT_TOKENS,
            "max-concurrency": at_a_time,
        },
    )
    blocks = int(ROOM * PREFIXES_PER_ENGINE * PREFIX_TOKENS / block_size(options))
    engine_args = ("--max-model-len", "4096", "--num-gpu-blocks-override", str(blocks))
    title = (
        f"{prefixes} prefixes of {PREFIX_TOKENS} tokens, {REQUESTS_PER_PREFIX} requests each, with {SUFFIX_TOKENS} "
        f"tokens more and {OUTPUT_TOKENS} of output; {at_a_time} at a time"
    )
    compare(options, title, load, engine_args)


if __name__ == "__main__":
    main()
