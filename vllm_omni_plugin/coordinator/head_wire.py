"""The codec of what heads and the coordinator say to each other."""

import msgspec

from vllm_omni_plugin.coordinator.deliveries import Answered, Delivery, ToHead
from vllm_omni_plugin.coordinator.head_messages import FromHead, PeerCall
from vllm_omni_plugin.coordinator.wire import MAX_REPLICA_LIST_BYTES, decode_strictly
from vllm_omni_plugin.errors import WireError

MAX_HEAD_FRAME_BYTES = 256 * 1024
# Several messages share a delivery up to this size; the largest is a full list.
DELIVERY_BYTES = 1024 * 1024
MAX_DELIVERY_BYTES = MAX_REPLICA_LIST_BYTES + DELIVERY_BYTES
_HEAD_PREFIX = b'{"type":'

_encoder = msgspec.json.Encoder()
_from_head: msgspec.json.Decoder[FromHead] = msgspec.json.Decoder(FromHead)
_delivery = msgspec.json.Decoder(Delivery)
_anything = msgspec.json.Decoder()
_DEEPER, _NO_DEEPER = b"[" * 64, b"]" * 64
_to_head: msgspec.json.Decoder[ToHead] = msgspec.json.Decoder(ToHead)


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


def encode_to_head(message: ToHead) -> msgspec.Raw:
    """Return ``message`` as a part of any number of deliveries."""
    return msgspec.Raw(_encoder.encode(message))


def encode_passed_on(message: PeerCall | Answered) -> msgspec.Raw:
    """Return ``message`` as a part of any number of deliveries; raise `WireError` if it is nested too deeply."""
    try:
        encoded = msgspec.Raw(_encoder.encode(message))
    except RecursionError as error:
        raise WireError(f"message to a head: {error}") from error
    # What is just not too deep here may be so where it arrives: the limit depends on the stack of the reader.
    decode_strictly(_anything, _DEEPER + encoded + _NO_DEEPER, "message to a head", MAX_DELIVERY_BYTES)
    return encoded


def decode_to_head(message: msgspec.Raw) -> ToHead:
    """Return one message of a delivery; raise `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_to_head, message, "message to a head", MAX_DELIVERY_BYTES)


def encode_delivery(delivery: Delivery) -> bytes:
    """Return ``delivery`` as one frame."""
    return _encoder.encode(delivery)


def decode_delivery(frame: bytes) -> Delivery:
    """Return the delivery in ``frame``, its messages still encoded; raise `WireError` if it is none."""
    return decode_strictly(_delivery, frame, "delivery", MAX_DELIVERY_BYTES)
