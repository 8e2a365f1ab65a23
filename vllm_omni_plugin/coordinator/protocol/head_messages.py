"""What heads and the coordinator say to each other, and what nodes ask it before they start.

A head's frames are objects whose first key is ``type``, which no replica's announcement is. A frame to a head is a list
of such objects; an empty one answers a beat.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from vllm_omni_plugin.coordinator.protocol.control_messages import (
    MAX_REPLICA_LIST_BYTES,
    Address,
    Ordinal,
    QueueLength,
    ReplicaId,
    ReplicaKey,
    ReplicaList,
    StageId,
    WallSeconds,
    decode_strictly,
)
from vllm_omni_plugin.errors import WireError

SESSION_PROTOCOL = 2
"""Version of these messages. Ends that differ do not work together."""

MAX_HEAD_ID_CHARS = 128
MAX_METHOD_CHARS = 128
MAX_NAMED_ENGINES = 8192
MAX_STAGES = 1024
MAX_ERROR_CHARS = 4096
# As many as every reader of JSON takes for exact integers.
ENGINE_KEYS = 2**53
# A frame of so many rows with addresses of the greatest length is not larger than a head's frame may be.
ROWS_PER_FRAME = 400
MAX_LISTENING = 32
MAX_NONCE_CHARS = 64
REACHABILITY_TIMEOUT_S = 2.0
"""For a node's ports to be reached: a second request for a connection is sent after 1 s."""
MAX_HEAD_FRAME_BYTES = 256 * 1024
# Several messages share a frame up to this size; the largest message is a full list.
SHARED_FRAME_BYTES = 1024 * 1024
MAX_FRAME_TO_HEAD_BYTES = MAX_REPLICA_LIST_BYTES + SHARED_FRAME_BYTES
_HEAD_PREFIX = b'{"type":'

HeadId = Annotated[str, Meta(min_length=1, max_length=MAX_HEAD_ID_CHARS)]
Method = Annotated[str, Meta(min_length=1, max_length=MAX_METHOD_CHARS)]
EngineKey = Annotated[int, Meta(ge=0, lt=ENGINE_KEYS)]
ErrorText = Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]


def engine_key(stage_id: int, input_addr: str, output_addr: str, incarnation: int) -> int:
    """By what heads name one start of a replica to each other, so that its work never counts for another start.

    A hash, since addresses would be three quarters of what the coordinator has to write. That two of 8,192 share one
    has a chance of 4 in 10**9; what others have on one of the two would then count for the other as well.
    """
    identity = f"{stage_id} {input_addr} {output_addr} {incarnation}"
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest()) % ENGINE_KEYS


class ReplicaWork(Struct, frozen=True, array_like=True, gc=False):
    """What one head has in flight on one replica.

    Attributes:
        engine: See `engine_key`.
        requests: How many; 0: none any more.
        prefill_tokens: Tokens of their prompts that it has yet to compute.
    """

    engine: EngineKey
    requests: QueueLength
    prefill_tokens: Ordinal


class ReplicaIdRow(Struct, frozen=True, array_like=True, gc=False):
    """The number by which a head knows a replica."""

    stage_id: StageId
    input_addr: Address
    output_addr: Address
    replica_id: ReplicaId


class Hello(Struct, frozen=True, tag="hello"):
    """Opens a session, or opens it anew after a lost connection or an overflow. Repeated until it is answered.

    Attributes:
        head_id: The head's.
        session: Grows with each session of the head, so that what is left of an older connection is recognised.
        protocol: `SESSION_PROTOCOL` of the head.
    """

    head_id: HeadId
    session: Ordinal
    protocol: Ordinal


class Beat(Struct, frozen=True, tag="beat"):
    """The head is there; answered by an empty list."""


class WorkReport(Struct, frozen=True, tag="work"):
    """What a head has in flight. The first of a session is full.

    Attributes:
        full: Whether replicas that are not in it have nothing; otherwise it has those that changed.
        work: By replica.
    """

    full: bool
    work: Annotated[list[ReplicaWork], Meta(max_length=ROWS_PER_FRAME)]


class KnownReplicaIds(Struct, frozen=True, tag="numbers"):
    """The numbers by which a head has known replicas, for a coordinator that has just started."""

    numbers: Annotated[list[ReplicaIdRow], Meta(max_length=ROWS_PER_FRAME)]


class OperatorCall(Struct, frozen=True, tag="call"):
    """An operator's call, to be numbered and passed on to all heads; see `NumberedCall`.

    Attributes:
        call_id: The caller's name for it.
        method: See `call_arguments`.
        arguments: Likewise.
        stages: Whose engines are called.
        called_engines: The engines that the caller calls itself.
    """

    call_id: Ordinal
    method: Method
    arguments: list[Any]
    stages: Annotated[list[StageId], Meta(max_length=MAX_STAGES)]
    called_engines: Annotated[list[EngineKey], Meta(max_length=MAX_NAMED_ENGINES)] = msgspec.field(name="told")


class CallOutcome(Struct, frozen=True, tag="call_outcome"):
    """What became of a call, said by its caller and passed on to the other heads.

    Attributes:
        number: The call's.
        taken: For each of its stages, whether any engine took it.
        failed: Engines that did not take what others took.
        cleared: Engines that dropped their prefix caches.
    """

    number: Ordinal
    taken: Annotated[list[bool], Meta(max_length=MAX_STAGES)]
    failed: Annotated[list[EngineKey], Meta(max_length=MAX_NAMED_ENGINES)] = []
    cleared: Annotated[list[EngineKey], Meta(max_length=MAX_NAMED_ENGINES)] = []


class CallDone(Struct, frozen=True, tag="call_done"):
    """This head has done what the outcome of a call asks of it."""

    number: Ordinal


class StageState(Struct, frozen=True):
    """What the engines of one stage were told.

    Attributes:
        stage_id: The stage.
        replay: The calls that bring a fresh engine to this state: method and arguments.
        unreplayable: Whether that is not all.
    """

    stage_id: StageId
    replay: list[tuple[Method, list[Any]]]
    unreplayable: bool


class FleetState(Struct, frozen=True, tag="fleet_state"):
    """A snapshot of what operators have told the fleet: to a head at each resync, from one that knows more.

    Attributes:
        number: Of the last call in it.
        stages: Those that were told anything.
        drained: Replicas that an operator has drained: stage, input and output address.
    """

    number: Ordinal
    stages: Annotated[list[StageState], Meta(max_length=MAX_STAGES)]
    drained: list[ReplicaKey]


class Bye(Struct, frozen=True, tag="bye"):
    """The head leaves."""


class HeadQuery(Struct, frozen=True, tag="question", omit_defaults=True):
    """Asked by a node before it loads a model. Needs no session; older coordinators do not answer it.

    Attributes:
        stage_id: That its replicas will serve.
        listening: ZMQ addresses with numeric hosts on which it listens while it asks, to be told whether this machine
            reaches them.
        nonce: What it says there to who connects, and then hangs up.
    """

    stage_id: StageId
    listening: Annotated[list[Address], Meta(max_length=MAX_LISTENING)] = []
    nonce: Annotated[str, Meta(max_length=MAX_NONCE_CHARS)] = ""


class HeadInfo(Struct, frozen=True, tag="facts"):
    """The answer to a `HeadQuery`, in a frame of its own.

    Attributes:
        timestamp: Wall-clock seconds since the epoch.
        stages: Those of the head; empty: not to be told.
        fingerprint: What all replicas of that stage have in common; empty likewise, or if there is no such stage.
        trying: Whether `ReachabilityReport` follows.
    """

    timestamp: WallSeconds
    stages: list[StageId]
    fingerprint: dict[str, str]
    trying: bool = False


class ReachabilityReport(Struct, frozen=True, tag="reached"):
    """Follows `HeadInfo`, in a frame of its own and `REACHABILITY_TIMEOUT_S` later at most.

    Attributes:
        unreached: Those of the addresses asked about on which the nonce was not heard, and why.
    """

    unreached: dict[str, str]


class Welcome(Struct, frozen=True, tag="welcome"):
    """A full resync begins: these are the other heads, then the replica list and the loads of the others.

    Attributes:
        heads: Of a head whose load does not follow, what was known stands until it reports.
        starting: Whether the coordinator has just started, and wants `KnownReplicaIds`.
    """

    heads: list[HeadId]
    starting: bool


class SessionRefused(Struct, frozen=True, tag="refused"):
    """This head gets no session; the answer to each `Hello`."""

    reason: ErrorText


class FullList(ReplicaList, frozen=True, tag="full_list"):
    """The replicas of all stages. Here and in `ListDelta`, a row's `last_heartbeat` may be older than its last one."""


class ListDelta(ReplicaList, frozen=True, tag="list_delta", kw_only=True):
    """What makes a list out of the one before it: rows that are new or changed, and those that are gone.

    A row may be told that the head has already, and the end of one that it does not have.

    Attributes:
        removed: Keys of the rows that are gone: stage, input and output address.
    """

    removed: list[ReplicaKey]


class PeerWork(Struct, frozen=True, tag="work"):
    """What a head has in flight: all of it (`full`), or what changed. A head's own reports come back to it, too."""

    head_id: HeadId
    full: bool
    work: list[ReplicaWork]


class NumberedCall(OperatorCall, frozen=True, tag="numbered_call", kw_only=True):
    """A call of a head, its own included, in the order in which all heads get them.

    Attributes:
        number: One more than that of the call before.
        head_id: The caller.
    """

    number: Ordinal
    head_id: HeadId


class CallRefused(Struct, frozen=True, tag="call_refused"):
    """To the caller: its call gets no number. Its operator gets 503, since the same call may succeed later."""

    call_id: Ordinal
    reason: ErrorText


class TakeOverCall(Struct, frozen=True, tag="take_over"):
    """The caller has gone before it said what became of its call: this head makes it again, as its caller."""

    call: NumberedCall


class CallFinished(Struct, frozen=True, tag="call_finished"):
    """To the caller: all other heads have done what the outcome asks of them."""

    number: Ordinal


class HeadLeft(Struct, frozen=True, tag="head_left"):
    """Another head has left, or was silent for too long."""

    head_id: HeadId


class SessionLost(Struct, frozen=True):
    """Never sent: a head's client says so of a coordinator that is silent. The last list stands."""


CallMessageFromHead = OperatorCall | CallOutcome | CallDone | FleetState
FromHead = Hello | Beat | WorkReport | KnownReplicaIds | CallMessageFromHead | Bye
CallMessageToHead = NumberedCall | CallRefused | TakeOverCall | CallOutcome | CallFinished | FleetState
ToHead = Welcome | SessionRefused | FullList | ListDelta | PeerWork | HeadLeft | CallMessageToHead

_encoder = msgspec.json.Encoder()
_from_head: msgspec.json.Decoder[FromHead | HeadQuery] = msgspec.json.Decoder(FromHead | HeadQuery)
_head_info: msgspec.json.Decoder[tuple[HeadInfo]] = msgspec.json.Decoder(tuple[HeadInfo])
_reachability: msgspec.json.Decoder[tuple[ReachabilityReport]] = msgspec.json.Decoder(tuple[ReachabilityReport])
_to_head: msgspec.json.Decoder[list[ToHead]] = msgspec.json.Decoder(list[ToHead])
_anything = msgspec.json.Decoder()
_DEEPER, _NO_DEEPER = b"[" * 64, b"]" * 64


def is_of_head(frame: bytes) -> bool:
    """Whether a frame that the coordinator got claims to be a head's."""
    return frame.startswith(_HEAD_PREFIX)


def encode_from_head(message: FromHead | HeadQuery) -> bytes:
    """Return ``message`` as one frame; raise `WireError` if the coordinator would refuse it."""
    try:
        frame = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise WireError(f"message of a head: {error}") from error
    decode_from_head(frame)
    return frame


def decode_from_head(frame: bytes) -> FromHead | HeadQuery:
    """Return the message in ``frame``; raise `WireError` naming the field and what is wrong with it."""
    return decode_strictly(_from_head, frame, "message of a head", MAX_HEAD_FRAME_BYTES)


def encode_to_head(message: ToHead | HeadInfo | ReachabilityReport) -> Raw:
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


def decode_head_info(frame: bytes) -> HeadInfo:
    """Return the answer to a question in ``frame``; raise `WireError` naming the field and what is wrong with it."""
    (facts,) = decode_strictly(_head_info, frame, "answer to a question", MAX_FRAME_TO_HEAD_BYTES)
    return facts


def decode_reachability(frame: bytes) -> ReachabilityReport:
    """Return what follows the answer to a question, from ``frame``; raises as `decode_head_info` does."""
    (reached,) = decode_strictly(_reachability, frame, "ports reached", MAX_FRAME_TO_HEAD_BYTES)
    return reached
