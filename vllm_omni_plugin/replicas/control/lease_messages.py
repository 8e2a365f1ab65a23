"""What a head and a replica server say to each other beside the data path: attaching, staying attached, leaving.

UTF-8 JSON, one message per frame, as on the coordinator's wire. The head's socket is a DEALER, the server's a ROUTER.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.control_messages import decode_strictly
from vllm_omni_plugin.replicas.kv_events.cache_log import MAX_PART, Cursor

PROTOCOL_VERSION = 4
"""Of the messages below and of the data path. Ends that differ do not work together."""

CONTROL_ROLE = "replica"
"""Of the keys derived from a secret: those of control sockets."""

MAX_CONTROL_BYTES = 256 * 1024
MAX_TEXT_CHARS = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Credential = Annotated[str, Meta(min_length=40, max_length=40)]
Fingerprint = Annotated[dict[Text, Text], Meta(max_length=64)]
Keys = Annotated[bytes, Meta(max_length=8 * MAX_PART)]


class Attach(Struct, frozen=True, tag="attach"):
    """Head to server: may I send requests to this replica?

    Attributes:
        protocol: `PROTOCOL_VERSION` of the head.
        incarnation: the incarnation of the replica that the head means, from the replica list.
        head_id: names the head process in the server's log.
        credential: what the head will show on the data sockets, made for this attachment only: the public half of a
            CURVE key pair (Z85) where links are encrypted, else a random word of the same length.
        fingerprint: the head's configuration, see `vllm_api.launch.model_fingerprint`.
    """

    protocol: int
    incarnation: Annotated[int, Meta(ge=0)]
    head_id: Text
    credential: Credential
    fingerprint: Fingerprint


class RenewLease(Struct, frozen=True, tag="beat"):
    """Head to server, every heartbeat interval: I am here and hold this lease."""

    lease: int


class Detach(Struct, frozen=True, tag="detach"):
    """Head to server: I am done with this replica. What still runs for me may be aborted."""

    lease: int


class DrainReplica(Struct, frozen=True, tag="leave"):
    """Head to server, on behalf of its administrator: drain, end the engine, do not come back."""

    lease: int


class StateSynced(Struct, frozen=True, tag="told"):
    """Head to server: the engine has been told everything that the fleet's operators have told the others."""

    lease: int


class PollCache(Struct, frozen=True, tag="follow"):
    """Head to server: tell me what the engine has cached, from here on, as soon as there is something to tell.

    Answered by one `CacheChanges`. A head sends the next one then, or the same again if the answer may be lost.

    Attributes:
        lease: the head's.
        cursor: that of the last answer, or `cache_log.BEGINNING`.
    """

    lease: int
    cursor: Cursor


class Attached(Struct, frozen=True, tag="attached"):
    """Server to head: you hold a lease.

    Attributes:
        lease: names it from here on.
        input_addr: where to connect a PUSH for requests: frames are (identity, request type, payload...).
        output_addr: where to connect a PULL for outputs of requests sent with `client_index`; yours alone.
        client_index: to put into every request and utility call.
        identity: ZMQ identity of the engine, the first frame of every message to it.
        ready_response: what the engine said of itself when it was ready, as vLLM encoded it.
        max_message_bytes: what one message to the engine may have at most, all of its frames together.
        data_key: public CURVE key (Z85) of the data sockets, or "" where links are not encrypted.
        fingerprint: the server's configuration.
        synced: whether a head has said `StateSynced` of this engine, and it has had heads ever since.
    """

    lease: int
    input_addr: Text
    output_addr: Text
    client_index: int
    identity: bytes
    ready_response: bytes
    max_message_bytes: Annotated[int, Meta(ge=0)]
    data_key: Text
    fingerprint: Fingerprint
    synced: bool = field(name="told")


class AttachRefused(Struct, frozen=True, tag="refused"):
    """Server to head: no, and why.

    Attributes:
        reason: for both ends' logs; names what differs and both values.
        lasting: asking again is of no use until one end is started anew.
    """

    reason: Text
    lasting: bool


class Status(Struct, frozen=True, tag="status"):
    """Server to head: answers each `RenewLease`, and comes unasked on every change.

    Attributes:
        lease: the head's.
        status: UP; DRAINING: send nothing new and detach when done; ERROR or DOWN: the engine is lost or not trusted,
            and the lease with it.
        reason: why, unless UP.
        engine_failed: whether the engine crashed by itself, and was not ended from outside, hung or told to leave.
    """

    lease: int
    status: ReplicaStatus
    reason: Text = ""
    engine_failed: bool = False


class Expired(Struct, frozen=True, tag="expired"):
    """Server to head: I know of no such lease (any more). Attach again."""

    lease: int


class CacheChanges(Struct, frozen=True, tag="cache_changes"):
    """Server to head: what changed in the engine's prefix cache.

    Attributes:
        lease: the head's.
        since: the cursor that this answers.
        cursor: where to follow on.
        stored: see `CacheChange`; keys of eight bytes each, little endian.
        removed: likewise.
        restart: see `CacheChange`.
        complete: see `CacheChange`.
    """

    lease: int
    since: Cursor
    cursor: Cursor
    stored: Keys
    removed: Keys
    restart: bool
    complete: bool


ToServer = Attach | RenewLease | Detach | DrainReplica | StateSynced | PollCache
FromServer = Attached | AttachRefused | Status | Expired | CacheChanges

_encoder = msgspec.json.Encoder()
_to_server: msgspec.json.Decoder[ToServer] = msgspec.json.Decoder(ToServer)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def encode(message: ToServer | FromServer) -> bytes:
    """The message as one frame."""
    return _encoder.encode(message)


def decode_to_server(frame: bytes) -> ToServer:
    """The head's message in a frame; raises `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_to_server, frame, "control message", MAX_CONTROL_BYTES)


def decode_from_server(frame: bytes) -> FromServer:
    """The server's message in a frame; raises `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_from_server, frame, "control message", MAX_CONTROL_BYTES)
