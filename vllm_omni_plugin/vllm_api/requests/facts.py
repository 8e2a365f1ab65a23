"""What is read of vLLM's outputs, in types of our own. Importing this module imports nothing of vLLM."""

from typing import NamedTuple

ENDING = "Server shutting down"
"""How an engine refuses every call once it was told to end. It finishes the requests that it has."""


class LoadReport(NamedTuple):
    """What an engine says of its load with a step.

    Attributes:
        waiting: requests it has not begun.
        running: requests it has begun.
        kv_usage: share of its KV memory in use, 0 to 1.
    """

    waiting: int
    running: int
    kv_usage: float


class BatchLimits(NamedTuple):
    """What an engine puts into one step at most; zeros if unknown.

    Attributes:
        tokens: of prompts and answers together.
        sequences: requests that it works on at the same time.
    """

    tokens: int = 0
    sequences: int = 0


class CacheSize(NamedTuple):
    """KV memory of an engine; zeros if unknown.

    Attributes:
        blocks: number of its blocks.
        block_size: tokens in each.
    """

    blocks: int = 0
    block_size: int = 0
