"""What replicas say to the coordinator, and it to subscribers: UTF-8 JSON, one frame per message, strictly decoded.

Field names are the wire's keys.
"""

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.errors import WireError

MAX_STAGE_ID = 1023
MAX_QUEUE_LENGTH = 2**31 - 1
MAX_ADDRESS_CHARS = 256
# As many as a table may hold, and as many again that are kept for replicas of the coordinator before.
MAX_REPLICA_ID = 8191
MAX_EVENT_BYTES = 64 * 1024
# The largest table allowed, with the longest addresses allowed, is smaller than this.
MAX_REPLICA_LIST_BYTES = 24 * 1024 * 1024
_MAX_DETAIL_CHARS = 200

StageId = Annotated[int, Meta(ge=0, le=MAX_STAGE_ID)]
QueueLength = Annotated[int, Meta(ge=0, le=MAX_QUEUE_LENGTH)]
Address = Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS_CHARS)]
OptionalAddress = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
Ordinal = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ReplicaId = Annotated[int, Meta(ge=0, le=MAX_REPLICA_ID)]
OptionalReplicaId = Annotated[int, Meta(ge=-1, le=MAX_REPLICA_ID)]
WallSeconds = Annotated[float, Meta(ge=0)]
EventType = Literal["update", "heartbeat"]


class ReplicaStatus(StrEnum):
    """What a replica says of itself."""

    UP = "up"
    DOWN = "down"
    ERROR = "error"
    DRAINING = "draining"


class ReplicaEvent(Struct, frozen=True):
    """One announcement of one replica. Each carries the whole registration, so that any lost one is healed by the next.

    Attributes:
        input_addr: ZMQ address on which the replica takes requests.
        output_addr: ZMQ address on which it gives outputs.
        stage_id: Stage it serves, 0 to 1023.
        event_type: Why it was sent: ``update`` (joined, changed or leaving) or ``heartbeat`` (nothing new). The effect
            depends on the other fields alone.
        status: ``DOWN`` means it leaves of its own accord.
        queue_length: Requests waiting in it, 0 to 2**31-1.
        incarnation: Grows each time the replica starts again. 0: not numbered.
        sequence: Grows with each event of one incarnation, so that a replay is recognised. 0: not numbered, then events
            of the same incarnation count in order of arrival.
        control_addr: ZMQ address on which heads attach; empty for a replica that needs no attaching.
    """

    input_addr: Address
    output_addr: Address
    stage_id: StageId
    event_type: EventType
    status: ReplicaStatus
    queue_length: QueueLength
    incarnation: Ordinal = 0
    sequence: Ordinal = 0
    control_addr: OptionalAddress = ""


class Addressed(Protocol):
    """What is about one replica."""

    @property
    def stage_id(self) -> int: ...

    @property
    def input_addr(self) -> str: ...

    @property
    def output_addr(self) -> str: ...


class ReplicaKey(NamedTuple):
    """What makes two announcements be about the same replica. An array on the wire."""

    stage_id: StageId
    input_addr: Address
    output_addr: Address

    @classmethod
    def of(cls, about: Addressed) -> "ReplicaKey":
        """Return the key of the replica that something is about."""
        return cls(about.stage_id, about.input_addr, about.output_addr)


class ReplicaInfo(Struct, frozen=True):
    """One replica as the coordinator publishes it. Times are wall-clock seconds since the epoch.

    Attributes:
        replica_id: its number within its stage, the same for all heads; -1: not numbered.
    """

    input_addr: Address
    output_addr: Address
    stage_id: StageId
    status: ReplicaStatus
    queue_length: QueueLength
    last_heartbeat: WallSeconds
    registered_at: WallSeconds
    incarnation: Ordinal = 0
    control_addr: OptionalAddress = ""
    replica_id: OptionalReplicaId = -1


class ReplicaList(Struct, frozen=True):
    """The replicas of all stages at one moment.

    Attributes:
        replicas: Those that are UP and may be given work.
        timestamp: Wall-clock seconds since the epoch; 0.0 when nothing was received yet.
        no_new_work: Those that must be given no new work but may finish what they have: suspected of being dead, or
            draining. A replica in neither list is gone.
    """

    replicas: list[ReplicaInfo]
    timestamp: WallSeconds
    no_new_work: list[ReplicaInfo] = []


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
