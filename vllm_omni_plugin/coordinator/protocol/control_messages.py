"""Messages from replicas to the coordinator, and from it to subscribers. The keys on the wire are the field names."""

from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import printable

MAX_STAGE_ID = 1023
MAX_QUEUE_LENGTH = 2**31 - 1
MAX_ADDRESS_CHARS = 256
# Above a full membership table, as many remembered ids, and the engines of the first head.
MAX_REPLICA_ID = 9_999
MAX_NUMBER = 32767
MAX_HOST_SLOT_CHARS = 128
MAX_EVENT_BYTES = 64 * 1024
# A full membership table with the longest addresses is smaller than this.
MAX_REPLICA_LIST_BYTES = 24 * 1024 * 1024
_MAX_DETAIL_CHARS = 200
_LATER_VERSIONS = 2
_DATA = frozenset({"arguments", "stages", "state", "told"})
"""Keys whose texts must arrive as they are: what operator calls give to engines."""

StageId = Annotated[int, Meta(ge=0, le=MAX_STAGE_ID)]
QueueLength = Annotated[int, Meta(ge=0, le=MAX_QUEUE_LENGTH)]
Address = Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS_CHARS)]
OptionalAddress = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
Ordinal = Annotated[int, Meta(ge=0, le=2**63 - 1)]
OptionalReplicaId = Annotated[int, Meta(ge=-1, le=MAX_REPLICA_ID)]
OptionalNumber = Annotated[int, Meta(ge=-1, le=MAX_NUMBER)]
OptionalHostSlot = Annotated[str, Meta(max_length=MAX_HOST_SLOT_CHARS)]
WallSeconds = Annotated[float, Meta(ge=0)]
EventType = Literal["update", "heartbeat"]


class ReplicaStatus(StrEnum):
    UP = "up"
    DOWN = "down"
    ERROR = "error"
    DRAINING = "draining"


class ReplicaEvent(Struct, frozen=True):
    """One whole registration of one replica.

    If lost: the next one replaces it, after a heartbeat interval at the latest.

    Attributes:
        event_type: ``update`` (the replica joins, changes or leaves) or ``heartbeat``. It does not change the effect.
        status: ``DOWN`` means that the replica leaves.
        queue_length: Requests that wait in the replica.
        incarnation: Grows with each start of the replica. 0: unknown.
        sequence: Grows with each event of one incarnation, so that the coordinator detects replays. 0: unknown; events
            of the same incarnation then count in order of arrival.
        control_addr: ZMQ address on which heads attach; empty for a replica without attachment.
        number: Unique in the fleet, from `HeadInfo` or chosen by the node. -1: unknown.
        host_slot: Names the replica's place on its machine, in all its restarts. Only one process has it at a time.
            Empty: unknown.
        replica_id: The last id that a head called it by, see `ReplicaInfo`. -1: unknown.
        in_use: Whether a head is attached to it. None: unknown.
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
    number: OptionalNumber = -1
    host_slot: OptionalHostSlot = ""
    replica_id: OptionalReplicaId = -1
    in_use: bool | None = None


class HasReplicaAddress(Protocol):
    @property
    def stage_id(self) -> int: ...

    @property
    def input_addr(self) -> str: ...

    @property
    def output_addr(self) -> str: ...


class ReplicaKey(NamedTuple):
    """Identifies a replica. An array on the wire."""

    stage_id: StageId
    input_addr: Address
    output_addr: Address

    @classmethod
    def of(cls, source: HasReplicaAddress) -> "ReplicaKey":
        return cls(source.stage_id, source.input_addr, source.output_addr)


class ReplicaInfo(Struct, frozen=True):
    """One row of the replica list. Times are seconds since the epoch. ``replica_id``: within the stage; -1: none.

    ``in_use``: see `ReplicaEvent`.
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
    in_use: bool | None = None


class ReplicaList(Struct, frozen=True):
    """The replicas of all stages at one moment.

    If lost: the next one replaces it, after 5 s at the latest.

    Attributes:
        replicas: Replicas that are UP and take requests.
        timestamp: Wall-clock seconds since the epoch; 0.0 before the first list.
        no_new_work: Late or draining replicas. They finish their requests and get no new ones. A replica in neither
            list is gone.
    """

    replicas: list[ReplicaInfo]
    timestamp: WallSeconds
    no_new_work: list[ReplicaInfo] = []


def is_compatible(theirs: int, ours: int, oldest: int) -> bool:
    """Whether two ends of these versions understand each other. ``oldest``: the oldest version that this end reads.

    Each version reads the two before it, so this end may rely on the next two to read it.
    """
    return oldest <= theirs <= ours + _LATER_VERSIONS


_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(ReplicaEvent)
_list_decoder = msgspec.json.Decoder(ReplicaList)


def encode_event(event: ReplicaEvent) -> bytes:
    """Return the frame of ``event``. Raises `WireError` if the coordinator would refuse it."""
    return encode_strictly(event, _event_decoder, "replica event", MAX_EVENT_BYTES)


def decode_event(frame: bytes) -> ReplicaEvent:
    """Return the event in ``frame``. Unknown keys are ignored. Raises `WireError` with the field and its fault."""
    return decode_strictly(_event_decoder, frame, "replica event", MAX_EVENT_BYTES)


def encode_replica_list(replicas: ReplicaList) -> bytes:
    return _encoder.encode(replicas)


def decode_replica_list(frame: bytes) -> ReplicaList:
    """Return the list in ``frame``. Raises `WireError` with the field and its fault."""
    return decode_strictly(_list_decoder, frame, "replica list", MAX_REPLICA_LIST_BYTES)


def encode_strictly(message: Struct, decoder: msgspec.json.Decoder[_T], what: str, max_bytes: int) -> bytes:
    """Encode a frame, and check that ``decoder`` accepts it. Raises `WireError` as `decode_strictly` does."""
    try:
        frame = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise WireError(f"{what}: {error}") from error
    decode_strictly(decoder, frame, what, max_bytes)
    return frame


def decode_strictly(decoder: msgspec.json.Decoder[_T], frame: bytes, what: str, max_bytes: int) -> _T:
    """Decode a frame; its texts are `printable` then. Raises `WireError` if it is invalid, beginning with ``what``."""
    if len(frame) > max_bytes:
        raise WireError(f"{what}: {len(frame)} bytes, at most {max_bytes} allowed")
    try:
        if b"\\" in frame or b"\x7f" in frame or not frame.isascii():
            frame = _encoder.encode(_with_printable_texts(msgspec.json.decode(frame)))
        return decoder.decode(frame)
    # RecursionError: msgspec parses the value of an unknown key in order to skip it.
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # The text may quote the frame, and the sender must not decide how much we log.
        raise WireError(f"{what}: {printable(str(error)[:_MAX_DETAIL_CHARS])}") from error


def _with_printable_texts(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case list():
            return [_with_printable_texts(each) for each in value]
        case dict():
            return {
                printable(key): each if key in _DATA else _with_printable_texts(each) for key, each in value.items()
            }
    return value
