"""Where an engine reports what it has cached, from what it said of itself when it was ready."""

from typing import NamedTuple

import msgspec
from msgspec import Struct

from vllm_omni_plugin.errors import ReplicaError

_ANY_HOST = {"tcp://*:": "tcp://127.0.0.1:", "tcp://[::]:": "tcp://[::1]:"}
"""What a publisher binds to be reached on every address of its machine, and the address that we take."""


class CacheSource(NamedTuple):
    """A publisher of cache events on this machine.

    Attributes:
        endpoint: where to subscribe.
        replay_endpoint: where to ask for what was missed, None if nobody answers.
        topic: what its messages begin with.
        blocks: KV blocks of the engine.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    blocks: int


class _Publisher(Struct):
    """vLLM's `KVEventsConfig`, as the engine resolved it."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class _ReadyResponse(Struct):
    """What we read of vLLM's `EngineCoreReadyResponse`."""

    num_gpu_blocks: int = 0
    kv_events_config: _Publisher | None = None


_decoder: msgspec.msgpack.Decoder[_ReadyResponse] = msgspec.msgpack.Decoder(_ReadyResponse)


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
        return _decoder.decode(ready_response)
    except msgspec.DecodeError:
        # That it is no ready response is noticed by those who need more of it.
        return _ReadyResponse()


def _from_here(endpoint: str) -> str:
    for bound, reached in _ANY_HOST.items():
        if endpoint.startswith(bound):
            return reached + endpoint.removeprefix(bound)
    return endpoint
