"""Keys of KV blocks, which are the same in every process and for every engine."""

import json
import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from vllm_omni_plugin.balancing.interface import Prompt

ROOT = 0
"""The parent key of the first block."""

ExtraKeys = Sequence[object]
"""What distinguishes blocks with equal tokens, as vLLM publishes it: strings and pairs (string, number)."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode token ids for `block_key`: four bytes each, little endian."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def block_key(parent: int, tokens: "bytes | memoryview", extra: ExtraKeys = ()) -> int:
    """The 64-bit key of a block. Keys are chained as in vLLM's prefix cache, but without a seed per process.

    `extra` are an adapter's name, multimodal inputs with their offsets in the block, and a cache salt. Names and salts
    enter only the key of the first block; the chain passes them on. Source: XXH3 (Collet), seeded with the parent.
    """
    if extra and parent != ROOT:
        extra = [item for item in extra if not isinstance(item, str)]
    if extra:
        tokens = bytes(tokens) + json.dumps(extra).encode()
    return xxh3_64_intdigest(tokens, seed=parent)


def prompt_keys(prompt: Prompt, block_size: int) -> list[int]:
    """Keys of the full blocks of a prompt, in order. The list is cached in the prompt; do not change it.

    The last token is left out, as in vLLM: it is always computed, so that there are logits to sample from.
    """
    keys = prompt.known_keys.get(block_size)
    if keys is None:
        keys = prompt.known_keys[block_size] = _continue_keys([], prompt, prompt.token_ids, block_size)
    return keys


def answered_keys(prompt: Prompt, answer_ids: Sequence[int], block_size: int) -> list[int]:
    """Keys of the full blocks of a prompt and its answer, without the last token, which was never an input."""
    known = prompt_keys(prompt, block_size)
    return _continue_keys(known, prompt, [*prompt.token_ids[len(known) * block_size :], *answer_ids], block_size)


def _continue_keys(known: list[int], prompt: Prompt, rest: Sequence[int], block_size: int) -> list[int]:
    """`known`, followed by the keys of the full blocks of `rest`, the tokens after them."""
    if not prompt.cacheable:
        return []
    keys = known.copy()
    parent = keys[-1] if keys else ROOT
    begin, more = len(keys), max(0, len(rest) - 1) // block_size
    end = begin + more
    data = memoryview(pack_tokens(rest[: more * block_size]))
    width, has_extra_keys = 4 * block_size, bool(prompt.lora_name or prompt.cache_salt or prompt.media)
    for block in range(begin, end):
        tokens = data[(block - begin) * width : (block - begin + 1) * width]
        if has_extra_keys and (block == 0 or prompt.media):
            parent = block_key(parent, tokens, _extra_keys(prompt, block * block_size, block_size))
        else:
            parent = xxh3_64_intdigest(tokens, seed=parent)
        keys.append(parent)
    return keys


def _extra_keys(prompt: Prompt, begin: int, block_size: int) -> ExtraKeys:
    """What besides tokens makes a block another one, in the order of vLLM's `generate_block_hash_extra_keys`."""
    extra: list[object] = [prompt.lora_name] if prompt.lora_name else []
    end = begin + block_size
    extra += [
        [media.identifier, media.offset - begin]
        for media in prompt.media
        if media.offset < end and begin < media.offset + media.length
    ]
    if begin == 0 and prompt.cache_salt:
        extra.append(prompt.cache_salt)
    return extra
