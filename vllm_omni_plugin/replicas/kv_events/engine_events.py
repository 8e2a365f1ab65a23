"""The KV cache events that vLLM's engines publish, as far as we read them, and their addresses."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.errors import ReplicaError, WireError

EngineHash = int | bytes
"""An engine's own hash of a block, used only in its events."""

_MAX_DETAIL_CHARS = 200

_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class BlockStored(Struct, frozen=True, tag=True, gc=False):
    """Consecutive blocks that are reusable from now on.

    Attributes:
        parent_block_hash: hash of the previous block, None for the first block of a prompt.
        block_size: tokens of one block; 0 if the engine does not report tokens (vLLM's OffloadingConnector).
        medium: kind of memory.
        extra_keys: for each block what distinguishes it from others with the same tokens, see `block_keys`.
        group_idx: index of the KV cache group.
        kv_cache_spec_kind: the group's kind of attention.
        lookahead_token_ids: for each block the tokens after it on which its hash depends; None if it depends on none.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[_TokenId]
    block_size: Annotated[int, Meta(ge=0)]
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    lookahead_token_ids: list[list[_TokenId]] | None = None


class BlockRemoved(Struct, frozen=True, tag=True, gc=False):
    """A copy of each of these blocks was evicted."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, gc=False):
    """No block is reusable any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(Struct, frozen=True, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _AnyEvent(Struct, frozen=True, gc=False):
    type: str


_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
_batch_decoder: msgspec.msgpack.Decoder[_Batch] = msgspec.msgpack.Decoder(_Batch)
_kind_decoder: msgspec.msgpack.Decoder[_AnyEvent] = msgspec.msgpack.Decoder(_AnyEvent)
_event_decoder: msgspec.msgpack.Decoder[CacheEvent] = msgspec.msgpack.Decoder(CacheEvent)


def decode_events(payload: bytes, on_skipped: Callable[[str], object] = lambda reason: None) -> list[CacheEvent]:
    """Decode a batch. `on_skipped` is called with the reason for each event that is invalid but not needed.

    Raises `WireError` if the batch, or an event about evicted blocks, is invalid.
    """
    events: list[CacheEvent] = []
    try:
        for raw in _batch_decoder.decode(payload).events:
            try:
                events.append(_event_decoder.decode(raw))
            except _UNREADABLE as error:
                kind = _kind_decoder.decode(raw).type
                if kind == BlockRemoved.__name__:
                    # Evicted blocks would still count as cached.
                    raise
                on_skipped(f"{kind[:_MAX_DETAIL_CHARS]}: {str(error)[:_MAX_DETAIL_CHARS]}")
    except _UNREADABLE as error:
        raise WireError(f"batch of cache events: {str(error)[:_MAX_DETAIL_CHARS]}") from error
    return events


_ANY_HOST = {"tcp://*:": "tcp://127.0.0.1:", "tcp://[::]:": "tcp://[::1]:"}
"""Wildcard addresses that a publisher binds, and the address to connect to instead."""


class CacheSource(Struct):
    """A publisher of KV cache events: vLLM's `KVEventsConfig` as resolved by its engine, and the engine's KV blocks."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    blocks: int = 0


class _ReadyResponse(Struct):
    num_gpu_blocks: int = 0
    kv_events_config: CacheSource | None = None


_ready_decoder: msgspec.msgpack.Decoder[_ReadyResponse] = msgspec.msgpack.Decoder(_ReadyResponse)


def publishes_cache_events(ready_response: bytes) -> bool:
    """Whether an engine publishes KV cache events, at any address."""
    return _decode(ready_response).kv_events_config is not None


def find_cache_source(ready_response: bytes) -> CacheSource | None:
    """The publisher of an engine of this machine; None if it publishes no events.

    Raises `ReplicaError` if it publishes at an address to which we cannot subscribe.
    """
    ready = _decode(ready_response)
    publisher = ready.kv_events_config
    if publisher is None:
        return None
    endpoint = _from_here(publisher.endpoint)
    if endpoint == publisher.endpoint and not endpoint.startswith("ipc://"):
        # vLLM connects to such an address instead of binding it.
        raise ReplicaError(f"its engine connects to {endpoint} to publish KV cache events, instead of binding it")
    replay = publisher.replay_endpoint
    return CacheSource(endpoint, replay and _from_here(replay), publisher.topic, ready.num_gpu_blocks)


def _decode(ready_response: bytes) -> _ReadyResponse:
    try:
        return _ready_decoder.decode(ready_response)
    except msgspec.DecodeError:
        # Other readers of the ready response report the error.
        return _ReadyResponse()


def _from_here(endpoint: str) -> str:
    for bound, reached in _ANY_HOST.items():
        if endpoint.startswith(bound):
            return reached + endpoint.removeprefix(bound)
    return endpoint
