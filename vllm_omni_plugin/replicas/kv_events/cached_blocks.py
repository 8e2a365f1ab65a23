"""From an engine's own names of its cached blocks to names that every process computes alike."""

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
"""What vLLM calls the memory that the model computes in, on a CPU too."""
_GROUPS = (None, 0)
_FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")


class CachedBlocks:
    """The blocks that an engine has said are cached.

    An engine may hold several copies of a block, for it computes some of a prompt again that is cached; it reports each
    copy that it stores and each that it evicts, and the block can be reused while one is left. A request may make vLLM
    report the blocks that it reuses as if they were stored (`kv_cache_report_mode`); such a block is taken to be cached
    for longer than it is.

    Only the first KV cache group counts, and only if it attends to everything. A hit of a hybrid model needs its other
    groups too, so for such a model what is known here is an upper bound.

    With speculative decoding a block's name may depend on the tokens behind it, too. Here blocks that differ in these
    alone count as one, which is cached while any of them is: of a hit that is predicted the last block may be missing.

    Attributes:
        copies: how many there are of all blocks; never more than the engine has blocks, unless reports were lost.
    """

    def __init__(self) -> None:
        self.copies = 0
        self._keys: dict[EngineHash, int] = {}
        # Of the blocks that have more than one.
        self._further_copies: dict[EngineHash, int] = {}
        # How many names there are for a key, where tokens behind a block count.
        self._names: dict[int, int] = {}

    def apply(self, events: Iterable[CacheEvent]) -> CacheChange:
        """What the events of one batch, taken together, change."""
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
        """Nothing is known to be cached."""
        self.copies = 0
        self._keys.clear()
        self._further_copies.clear()
        self._names.clear()

    def _store(self, event: BlockStored) -> list[int]:
        parent = ROOT if event.parent_block_hash is None else self._keys.get(event.parent_block_hash)
        width = event.block_size * _TOKEN_BYTES
        tokens = memoryview(pack_tokens(event.token_ids))
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        # A block without tokens, whose chain was reported before we listened, or that leaves out some blocks
        # cannot be named.
        if not width or parent is None or not len(tokens) // width == len(event.block_hashes) == len(extra_keys):
            return []
        keys: list[int] = []
        for index, (block_hash, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            try:
                parent = block_key(parent, tokens[index * width : (index + 1) * width], extra or ())
            except TypeError:
                # A digest of embeddings in place of tokens: no prompt that we see is looked up by one.
                break
            keys.append(parent)
            self.copies += 1
            if block_hash in self._keys:
                self._further_copies[block_hash] = self._further_copies.get(block_hash, 0) + 1
            else:
                self._keys[block_hash] = parent
                if event.lookahead_token_ids is not None:
                    self._names[parent] = self._names.get(parent, 0) + 1
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
                others = self._names.pop(key, 1) - 1
                if others:
                    self._names[key] = others
                else:
                    keys.append(key)
        return keys


def _counts(event: BlockStored | BlockRemoved) -> bool:
    return event.medium in _MEDIA and event.group_idx in _GROUPS
