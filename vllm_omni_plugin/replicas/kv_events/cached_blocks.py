"""Converts an engine's own hashes of cached blocks to block keys that every process computes alike."""

from collections.abc import Iterable

from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.balancing.caches.block_keys import ROOT, block_key, pack_tokens
from vllm_omni_plugin.replicas.kv_events.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EngineHash,
)

_TOKEN_BYTES = 4
_MEDIA = (None, "GPU")
"""vLLM's name of the memory that the model uses, also on a CPU."""
_GROUPS = (None, 0)
_FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")


class CachedBlocks:
    """The blocks that an engine has reported as cached.

    An engine may store several copies of a block, since it recomputes parts of a cached prompt. It reports each copy
    that it stores or evicts, and the block is reusable while one copy is left. With `kv_cache_report_mode` vLLM may
    also report reused blocks as stored; such a block counts as cached for too long.

    Only the first KV cache group counts, and only with full attention. A hit of a hybrid model needs its other groups
    too, so for such a model this is an upper bound.

    With speculative decoding a hash may also depend on the tokens after the block. Blocks that differ only in these
    count as one, which is cached while one of them is, so the last block of a predicted hit may be missing.

    Attributes:
        copies: copies of all blocks; at most the number of the engine's blocks, unless reports were lost.
    """

    def __init__(self) -> None:
        self.copies = 0
        self._keys: dict[EngineHash, int] = {}
        # Copies after the first one.
        self._further_copies: dict[EngineHash, int] = {}
        # Hashes for each key, where the tokens after a block count.
        self._hashes: dict[int, int] = {}

    def apply(self, events: Iterable[CacheEvent]) -> CacheChange:
        """The net change of the events of one batch."""
        reusable: dict[int, bool] = {}
        restart = False
        for event in events:
            match event:
                case BlockStored() if _counts(event) and event.kv_cache_spec_kind in _FULL_ATTENTION:
                    reusable.update(dict.fromkeys(self._store(event), True))
                case BlockRemoved() if _counts(event):
                    reusable.update(dict.fromkeys(self._remove(event), False))
                case AllBlocksCleared():
                    self.clear()
                    reusable.clear()
                    restart = True
        stored = tuple(key for key, is_reusable in reusable.items() if is_reusable)
        removed = tuple(key for key, is_reusable in reusable.items() if not is_reusable)
        return CacheChange(stored, removed, restart)

    def clear(self) -> None:
        self.copies = 0
        self._keys.clear()
        self._further_copies.clear()
        self._hashes.clear()

    def _store(self, event: BlockStored) -> list[int]:
        """Keys of new blocks; none for blocks whose tokens or parent are not known."""
        parent = ROOT if event.parent_block_hash is None else self._keys.get(event.parent_block_hash)
        width = event.block_size * _TOKEN_BYTES
        tokens = memoryview(pack_tokens(event.token_ids))
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        # No key can be computed if tokens are missing, if the parent is unknown, or if blocks were left out.
        if not width or parent is None or not len(tokens) // width == len(event.block_hashes) == len(extra_keys):
            return []
        keys: list[int] = []
        for index, (block_hash, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            try:
                parent = block_key(parent, tokens[index * width : (index + 1) * width], extra or ())
            except TypeError:
                # A digest of embeddings instead of tokens: no prompt that we see has such a key.
                break
            keys.append(parent)
            self.copies += 1
            if block_hash in self._keys:
                self._further_copies[block_hash] = self._further_copies.get(block_hash, 0) + 1
            else:
                self._keys[block_hash] = parent
                if event.lookahead_token_ids is not None:
                    self._hashes[parent] = self._hashes.get(parent, 0) + 1
        return keys

    def _remove(self, event: BlockRemoved) -> list[int]:
        keys: list[int] = []
        for block_hash in event.block_hashes:
            if block_hash not in self._keys:
                continue
            self.copies -= 1
            further = self._further_copies.pop(block_hash, 0)
            if further > 1:
                self._further_copies[block_hash] = further - 1
            elif not further:
                key = self._keys.pop(block_hash)
                others = self._hashes.pop(key, 1) - 1
                if others:
                    self._hashes[key] = others
                else:
                    keys.append(key)
        return keys


def _counts(event: BlockStored | BlockRemoved) -> bool:
    """Whether a block is one that prompts can use: in the device's memory, of full attention."""
    return event.medium in _MEDIA and event.group_idx in _GROUPS
