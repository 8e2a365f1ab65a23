"""The codec of the control wire: UTF-8 JSON, one frame per message, strictly decoded."""

from typing import TypeVar

import msgspec

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaEvent, ReplicaList
from vllm_omni_plugin.errors import WireError

MAX_EVENT_BYTES = 64 * 1024
# The largest table allowed, with the longest addresses allowed, is smaller than this.
MAX_REPLICA_LIST_BYTES = 24 * 1024 * 1024
_MAX_DETAIL_CHARS = 200

_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(ReplicaEvent)
_list_decoder = msgspec.json.Decoder(ReplicaList)


def encode_event(event: ReplicaEvent) -> bytes:
    """Return ``event`` as one frame; raise `WireError` if the other end would refuse it."""
    try:
        frame = _encoder.encode(event)
    except (TypeError, OverflowError, UnicodeError) as error:
        raise WireError(f"replica event: {error}") from error
    decode_event(frame)
    return frame


def decode_event(frame: bytes) -> ReplicaEvent:
    """Return the event in ``frame``; raise `WireError` naming the field and what is wrong with it.

    Unknown keys are ignored, so that a newer replica may say more.
    """
    return decode_strictly(_event_decoder, frame, "replica event", MAX_EVENT_BYTES)


def encode_replica_list(replicas: ReplicaList) -> bytes:
    """Return ``replicas`` as one frame."""
    return _encoder.encode(replicas)


def decode_replica_list(frame: bytes) -> ReplicaList:
    """Return the list in ``frame``; raise `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_list_decoder, frame, "replica list", MAX_REPLICA_LIST_BYTES)


def decode_strictly(decoder: msgspec.json.Decoder[_T], frame: bytes, what: str, max_bytes: int) -> _T:
    """Return what ``decoder`` makes of ``frame``; raise `WireError`, which calls it ``what``, if it is not valid."""
    if len(frame) > max_bytes:
        raise WireError(f"{what}: {len(frame)} bytes, at most {max_bytes} allowed")
    try:
        return decoder.decode(frame)
    # RecursionError: msgspec descends into the value of an unknown key to skip it.
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # The text may quote the sender, who must not choose how much we log.
        raise WireError(f"{what}: {str(error)[:_MAX_DETAIL_CHARS]}") from error
