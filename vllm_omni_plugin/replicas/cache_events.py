"""What vLLM's engines publish about their prefix caches, as far as we read it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.errors import WireError

EngineHash = int | bytes
"""How an engine names a block: only its own events know it by that name."""

_MAX_DETAIL_CHARS = 200

_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class BlockStored(Struct, frozen=True, tag=True, gc=False):
    """Blocks that follow each other can be reused from now on.

    Attributes:
        block_hashes: the engine's names of them, in order.
        parent_block_hash: that of the block before, None for the first of a prompt.
        token_ids: all of theirs.
        block_size: tokens in each.
        medium: where they lie; None before engines said it.
        extra_keys: for each block what tells it from others of the same tokens, see `balancing.block_keys`.
        group_idx: which of the model's KV cache groups; None before engines said it.
        kv_cache_spec_kind: that group's kind of attention, if the engine says it.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[_TokenId]
    block_size: Annotated[int, Meta(ge=1)]
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Struct, frozen=True, tag=True, gc=False):
    """A copy of each of these blocks was evicted."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, gc=False):
    """No block can be reused any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True, gc=False):
    """What happened in one step of the engine, in order."""

    ts: float
    events: list[CacheEvent]


_decoder: msgspec.msgpack.Decoder[EventBatch] = msgspec.msgpack.Decoder(EventBatch)


def decode_events(payload: bytes) -> list[CacheEvent]:
    """The events of a batch; raises `WireError` saying what is wrong with it."""
    try:
        return _decoder.decode(payload).events
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WireError(f"batch of cache events: {str(error)[:_MAX_DETAIL_CHARS]}") from error
