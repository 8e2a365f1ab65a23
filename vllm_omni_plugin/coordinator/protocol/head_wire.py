"""The codec of what heads and the coordinator say to each other."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.control_wire import MAX_REPLICA_LIST_BYTES, decode_strictly
from vllm_omni_plugin.coordinator.protocol.head_messages import FromHead, ToHead
from vllm_omni_plugin.errors import WireError

MAX_HEAD_FRAME_BYTES = 256 * 1024
# Several messages share a frame up to this size; the largest message is a full list.
SHARED_FRAME_BYTES = 1024 * 1024
MAX_FRAME_TO_HEAD_BYTES = MAX_REPLICA_LIST_BYTES + SHARED_FRAME_BYTES
_HEAD_PREFIX = b'{"type":'

_encoder = msgspec.json.Encoder()
_from_head: msgspec.json.Decoder[FromHead] = msgspec.json.Decoder(FromHead)
_to_head: msgspec.json.Decoder[list[ToHead]] = msgspec.json.Decoder(list[ToHead])
_anything = msgspec.json.Decoder()
_DEEPER, _NO_DEEPER = b"[" * 64, b"]" * 64


def is_of_head(frame: bytes) -> bool:
    """Whether a frame that the coordinator got claims to be a head's."""
    return frame.startswith(_HEAD_PREFIX)


def encode_from_head(message: FromHead) -> bytes:
    """Return ``message`` as one frame; raise `WireError` if the coordinator would refuse it."""
    try:
        frame = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise WireError(f"message of a head: {error}") from error
    decode_from_head(frame)
    return frame


def decode_from_head(frame: bytes) -> FromHead:
    """Return the message in ``frame``; raise `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_from_head, frame, "message of a head", MAX_HEAD_FRAME_BYTES)


def encode_to_head(message: ToHead) -> Raw:
    """Return ``message`` as a part of any number of frames."""
    return Raw(_encoder.encode(message))


def require_flat(value: Any) -> None:
    """Raise `WireError` if a value is nested so deeply that a reader may refuse the frame that it is passed on in."""
    try:
        # What is just not too deep here may be so where it arrives: the limit depends on the stack of the reader.
        decode_strictly(_anything, _DEEPER + _encoder.encode(value) + _NO_DEEPER, "value", MAX_FRAME_TO_HEAD_BYTES)
    except RecursionError as error:
        raise WireError(f"value: {error}") from error


def frames_to_head(messages: Iterable[Raw]) -> Iterator[bytes]:
    """Yield frames with these messages in order, of a limited size each unless one message is larger."""
    batch: list[Raw] = []
    size = 0
    for message in messages:
        if batch and size + len(message) > SHARED_FRAME_BYTES:
            yield _encoder.encode(batch)
            batch, size = [], 0
        batch.append(message)
        size += len(message)
    if batch:
        yield _encoder.encode(batch)


def decode_to_head(frame: bytes) -> list[ToHead]:
    """Return the messages in ``frame``; raise `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_to_head, frame, "frame to a head", MAX_FRAME_TO_HEAD_BYTES)
