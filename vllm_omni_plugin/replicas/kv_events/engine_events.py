"""What vLLM's engines publish about their prefix caches, as far as we read it, and where."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.errors import ReplicaError, WireError

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
        block_size: tokens in each; 0 where the engine does not say which they are (vLLM's OffloadingConnector).
        medium: where they lie; None before engines said it.
        extra_keys: for each block what tells it from others of the same tokens, see `block_keys`.
        group_idx: which of the model's KV cache groups; None before engines said it.
        kv_cache_spec_kind: that group's kind of attention, if the engine says it.
        lookahead_token_ids: for each block the tokens behind it that its name depends on; None where it does on none.
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
    """No block can be reused any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(Struct, frozen=True, array_like=True, gc=False):
    """What happened in one step of the engine, in order."""

    ts: float
    events: list[msgspec.Raw]


class _AnyEvent(Struct, frozen=True, gc=False):
    type: str


_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
_batch_decoder: msgspec.msgpack.Decoder[_Batch] = msgspec.msgpack.Decoder(_Batch)
_kind_decoder: msgspec.msgpack.Decoder[_AnyEvent] = msgspec.msgpack.Decoder(_AnyEvent)
_event_decoder: msgspec.msgpack.Decoder[CacheEvent] = msgspec.msgpack.Decoder(CacheEvent)


def decode_events(payload: bytes, on_skipped: Callable[[str], object] = lambda reason: None) -> list[CacheEvent]:
    """The events of a batch that can be read.

    Args:
        payload: the batch.
        on_skipped: called with the reason for each event that cannot be, of which nothing needs to be known.

    Raises:
        WireError: the batch, or what it says of evicted blocks, cannot be read; the message says why.
    """
    events: list[CacheEvent] = []
    try:
        for raw in _batch_decoder.decode(payload).events:
            try:
                events.append(_event_decoder.decode(raw))
            except _UNREADABLE as error:
                kind = _kind_decoder.decode(raw).type
                if kind == BlockRemoved.__name__:
                    # Blocks that nobody knows to be gone would be counted upon.
                    raise
                on_skipped(f"{kind[:_MAX_DETAIL_CHARS]}: {str(error)[:_MAX_DETAIL_CHARS]}")
    except _UNREADABLE as error:
        raise WireError(f"batch of cache events: {str(error)[:_MAX_DETAIL_CHARS]}") from error
    return events


_ANY_HOST = {"tcp://*:": "tcp://127.0.0.1:", "tcp://[::]:": "tcp://[::1]:"}
"""What a publisher binds to be reached on every address of its machine, and the address that we take."""


class CacheSource(Struct):
    """A publisher of cache events on this machine: vLLM's `KVEventsConfig`, as its engine resolved it.

    Attributes:
        endpoint: where to subscribe.
        replay_endpoint: where to ask for what was missed, None if nobody answers.
        topic: what its messages begin with.
        blocks: KV blocks of the engine.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    blocks: int = 0


class _ReadyResponse(Struct):
    """What we read of vLLM's `EngineCoreReadyResponse`."""

    num_gpu_blocks: int = 0
    kv_events_config: CacheSource | None = None


_ready_decoder: msgspec.msgpack.Decoder[_ReadyResponse] = msgspec.msgpack.Decoder(_ReadyResponse)


def publishes_cache_events(ready_response: bytes) -> bool:
    """Whether an engine reports what it has cached, wherever to."""
    return _decode(ready_response).kv_events_config is not None


def find_cache_source(ready_response: bytes) -> CacheSource | None:
    """Where an engine of this machine reports what it has cached; None if it does not.

    Raises:
        ReplicaError: it reports to where we cannot be; the message says why.
    """
    ready = _decode(ready_response)
    publisher = ready.kv_events_config
    if publisher is None:
        return None
    endpoint = _from_here(publisher.endpoint)
    if endpoint == publisher.endpoint and not endpoint.startswith("ipc://"):
        # vLLM connects to such an address instead of binding it.
        raise ReplicaError(f"its engine sends KV cache events to {endpoint}, where only their receiver can take them")
    replay = publisher.replay_endpoint
    return CacheSource(endpoint, replay and _from_here(replay), publisher.topic, ready.num_gpu_blocks)


def _decode(ready_response: bytes) -> _ReadyResponse:
    try:
        return _ready_decoder.decode(ready_response)
    except msgspec.DecodeError:
        # That it is no ready response is noticed by those who need more of it.
        return _ReadyResponse()


def _from_here(endpoint: str) -> str:
    for bound, reached in _ANY_HOST.items():
        if endpoint.startswith(bound):
            return reached + endpoint.removeprefix(bound)
    return endpoint
