"""What is read of vLLM's structs, in types of our own. Importing this module imports nothing of vLLM."""

from collections.abc import Sequence
from typing import NamedTuple


class RequestFacts(NamedTuple):
    """What decides how much work a request is and which cached blocks it can use.

    Attributes:
        token_ids: the prompt; its length alone counts where `cacheable` is false.
        cacheable: whether the engine may take blocks of this prompt from its cache.
        lora_name: the adapter, "" for none.
        cache_salt: shares blocks only with prompts of the same salt, "" for none.
        media: for each multimodal input a hash of its content, the first of its placeholder tokens and their number.
        session: the session it belongs to, None for none.
        max_tokens: tokens that its answer may have at most, None if that is not bounded.
    """

    token_ids: Sequence[int]
    cacheable: bool = True
    lora_name: str = ""
    cache_salt: str = ""
    media: tuple[tuple[str, int, int], ...] = ()
    session: str | None = None
    max_tokens: int | None = None


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


class CacheSize(NamedTuple):
    """KV memory of an engine; zeros if unknown.

    Attributes:
        blocks: number of its blocks.
        block_size: tokens in each.
    """

    blocks: int = 0
    block_size: int = 0
