"""What it costs an engine to report its cache: one with KV events against one without, the same otherwise.

    python benchmarks/kv_events.py --model DIR --together --out benchmarks/results/kv_events.md

A fleet of one replica runs the model on a core of its own. Under `kv-aware` its engine reports every block that it
stores or evicts, and the head follows; under `prefix` it does not. The prompts have little in common and the cache is
soon full, so that nearly as much is reported as can be. With a tiny model vLLM's scheduler is a large part of an
iteration, so this is about the most that the reports can cost.
"""

from side_by_side import Load, arguments, block_size, compare

REQUESTS = 600
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 16
AT_A_TIME = 8
CACHED_TOKENS = 32_768


def main() -> None:
    """Run everything and write the table."""
    parser = arguments(__doc__, engines=1)
    parser.set_defaults(setups=["fleet:prefix", "fleet:kv-aware"], real=True)
    options = parser.parse_args()
    load = Load(
        REQUESTS,
        {
            "dataset-name": "random",
            "random-input-len": PROMPT_TOKENS,
            "random-output-len": OUTPUT_TOKENS,
            "max-concurrency": AT_A_TIME,
        },
    )
    blocks = CACHED_TOKENS // block_size(options)
    title = f"{REQUESTS} prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} of output, {AT_A_TIME} at a time"
    compare(options, title, load, ("--max-model-len", "4096", "--num-gpu-blocks-override", str(blocks)))


if __name__ == "__main__":
    main()
