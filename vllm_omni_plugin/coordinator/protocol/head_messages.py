"""Messages between heads and the coordinator, and between a node that starts and the coordinator.

docs/wire.md has a table of them, which `tools.wire_page` makes from their docstrings. A frame from a head is one JSON
object whose first key is ``type``. A frame to a head is a list of such objects; an empty list answers a `Beat`.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from vllm_omni_plugin.coordinator.protocol.control_messages import (
    MAX_HOST_SLOT_CHARS,
    MAX_NUMBER,
    MAX_REPLICA_LIST_BYTES,
    Ordinal,
    QueueLength,
    ReplicaKey,
    ReplicaList,
    StageId,
    WallSeconds,
    decode_strictly,
    encode_strictly,
)
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, OptionalHeadId, Version
from vllm_omni_plugin.errors import WireError

SESSION_PROTOCOL = OLDEST_SESSION_PROTOCOL = 4
"""Version of these messages, and the oldest one that is read, at least two back from the next version on."""

MAX_HEAD_ID_CHARS = 128
MAX_METHOD_CHARS = 128
MAX_GENERATION_CHARS = 64
MAX_NAMED_ENGINES = 8192
MAX_STAGES = 1024
MAX_ERROR_CHARS = 4096
_FIELDS_OF_GENERATION = (
    "stage, vLLM version, model, revision, code revision, load format, hf-overrides, tokenizer, tokenizer mode, "
    "runner, pooling, dtype, KV cache dtype, quantization, quantization config, max model length, prompt embeddings, "
    "images are normalized, multimodal, logprobs mode, logits processors, LoRA, stage name, stage class, options, "
    "plugin version"
)
"""A new field of a fingerprint comes here two versions later, when all versions that read this wire have it."""
# JSON numbers below this are exact for every reader.
ENGINE_KEYS = 2**53
# This many rows with the longest addresses fit into MAX_HEAD_FRAME_BYTES.
ROWS_PER_FRAME = 400
MAX_REPORTED_ADAPTERS = 12
# Cut by `WorkExchange`; an older reader refuses more.
MAX_ADAPTER_CHARS = 40
MAX_HOST_SLOTS = 1024
MAX_HEAD_FRAME_BYTES = 256 * 1024
# Messages share a frame up to this size. The largest message is a full list.
SHARED_FRAME_BYTES = 1024 * 1024
MAX_FRAME_TO_HEAD_BYTES = MAX_REPLICA_LIST_BYTES + SHARED_FRAME_BYTES
_HEAD_PREFIX = b'{"type":'

HeadId = Annotated[str, Meta(min_length=1, max_length=MAX_HEAD_ID_CHARS)]
EngineKey = Annotated[int, Meta(ge=0, lt=ENGINE_KEYS)]
EngineKeys = Annotated[list[EngineKey], Meta(max_length=MAX_NAMED_ENGINES)]
HostSlot = Annotated[str, Meta(min_length=1, max_length=MAX_HOST_SLOT_CHARS)]
ReplicaNumber = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
# See `adapter_key`. JSON writes each of these characters as one byte.
AdapterName = Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS, pattern=r"^[ !#-\[\]-~]*\Z")]
ErrorText = Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]


def engine_key(stage_id: int, input_addr: str, output_addr: str, incarnation: int) -> int:
    """Return the number that names one start of a replica between heads.

    It is a hash, because the addresses would be three quarters of the bytes that the coordinator writes. Two of 8,192
    replicas collide with a probability of 4e-9; then their work in flight is added up.
    """
    identity = f"{stage_id} {input_addr} {output_addr} {incarnation}"
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest()) % ENGINE_KEYS


def generation_of(fingerprints: Mapping[int, Mapping[str, str]]) -> str:
    """Return the name of a head's generation: a digest of what is compared with replicas, of all its stages."""
    names = frozenset(_FIELDS_OF_GENERATION.split(", "))
    compared = sorted(
        (stage_id, sorted((name, value) for name, value in fields.items() if name in names))
        for stage_id, fields in fingerprints.items()
    )
    return blake2b(_encoder.encode(compared), digest_size=8).hexdigest()


class ReplicaWork(Struct, frozen=True, array_like=True, gc=False):
    """The work in flight of one head on one replica, and its first LoRA adapters. Zero requests: none any more."""

    engine: EngineKey
    requests: QueueLength
    prefill_tokens: Ordinal
    adapters: Annotated[tuple[AdapterName, ...], Meta(max_length=MAX_REPORTED_ADAPTERS)] = ()


class Hello(Struct, frozen=True, tag="hello"):
    """Opens a session. The head repeats it until it gets `Welcome` or `SessionRefused`.

    If lost: it is repeated every second until it is answered.

    ``generation``: see `generation_of`. Heads know only those of their own, and share a document with them. Empty: an
    older head, which is of the generation of the coordinator's own head.
    """

    head_id: HeadId
    session: Ordinal
    protocol: Ordinal
    generation: Annotated[str, Meta(max_length=MAX_GENERATION_CHARS)] = ""


class Beat(Struct, frozen=True, tag="beat"):
    """Heartbeat of a head.

    If lost: the next one serves.
    """


class WorkReport(Struct, frozen=True, tag="work_report"):
    """Work in flight of a head: all of it (``full``), or the rows that changed. The first of a session is full.

    If lost: only with its session; the first report of the next one is full.
    """

    full: bool
    work: Annotated[list[ReplicaWork], Meta(max_length=ROWS_PER_FRAME)]


class FleetCall(Struct, frozen=True, tag="fleet_call", omit_defaults=True):
    """A call of an operator, which engines have accepted. The other heads do their part, and send `CallDone`.

    Attributes:
        call_id: the caller's own name of it.
        method, arguments, stages: for the engines that only other heads reach. "": there is nothing to call.
        state: the fleet's document after the call; None: the call changes nothing lasting.
        base_version, base_head: the document before it. The coordinator refuses the call if it has another one.
        reached: engines that have accepted the call.
        failed: engines that failed it, although others of their stage accepted it.
        cleared: engines that cleared their prefix caches.

    If lost: only with its session; the operator gets an error and repeats the call.
    """

    call_id: Ordinal
    method: Annotated[str, Meta(max_length=MAX_METHOD_CHARS)] = ""
    arguments: list[Any] = []
    stages: Annotated[list[StageId], Meta(max_length=MAX_STAGES)] = []
    state: FleetState | None = None
    base_version: Version = 0
    base_head: OptionalHeadId = ""
    reached: EngineKeys = []
    failed: EngineKeys = []
    cleared: EngineKeys = []


class CallDone(Struct, frozen=True, tag="call_done"):
    """This head has done its part of a call of the head ``head_id``.

    If lost: only with its session; a head with a new session counts as done.
    """

    call_id: Ordinal
    head_id: HeadId


class Bye(Struct, frozen=True, tag="bye"):
    """The head closes its session.

    If lost: the broken connection says the same, or 5 s of silence.
    """


class HeadQuery(Struct, frozen=True, tag="head_query", omit_defaults=True):
    """Sent by a node before it loads a model. It needs no session. Older coordinators do not answer.

    If lost: it is not repeated; `Attach` compares the configurations later.

    ``host_slots``: of the replicas that the node will start, see `ReplicaEvent`.
    """

    stage_id: StageId
    host_slots: Annotated[tuple[HostSlot, ...], Meta(max_length=MAX_HOST_SLOTS)] = ()


class HeadInfo(Struct, frozen=True, tag="head_info"):
    """The answer to `HeadQuery`.

    If lost: as `HeadQuery`.

    ``numbers``: one for each host slot; none while the coordinator learns the numbers of running replicas.
    """

    timestamp: WallSeconds
    stages: list[StageId]
    fingerprint: dict[str, str]
    numbers: Annotated[tuple[ReplicaNumber, ...], Meta(max_length=MAX_HOST_SLOTS)] = ()


class Welcome(Struct, frozen=True, tag="welcome"):
    """A full resync begins. ``heads`` are the other heads of this generation.

    If lost: resync.
    """

    heads: list[HeadId]


# The same in all versions, so that a head of another one can read the reason.
class SessionRefused(Struct, frozen=True, tag="refused"):
    """This head gets no session. It answers each `Hello`.

    If lost: it answers the next `Hello`.
    """

    reason: ErrorText


class FullList(ReplicaList, frozen=True, tag="full_list"):
    """The replicas of all stages. Here and in `ListDelta`, ``last_heartbeat`` may be older than the last heartbeat.

    If lost: resync.
    """


class ListDelta(ReplicaList, frozen=True, tag="list_delta", kw_only=True):
    """New and changed rows, and the keys of removed ones. Rows and keys may be known already.

    If lost: resync.
    """

    removed: list[ReplicaKey]


class HeadWork(Struct, frozen=True, tag="head_work"):
    """Work in flight of a head: all of it (``full``), or the rows that changed. The head itself gets it, too.

    If lost: resync.
    """

    head_id: HeadId
    full: bool
    work: list[ReplicaWork]


class RelayedCall(FleetCall, frozen=True, tag="relayed_call", kw_only=True):
    """A call of the head ``head_id``. All heads, the caller too, get the calls in the same order.

    If lost: resync: the document has what the calls have changed.
    """

    head_id: HeadId


class CallRefused(Struct, frozen=True, tag="call_refused"):
    """To the caller: the call is not passed on. The operator gets 503, because a retry may succeed.

    ``is_outdated``: the document has been changed meanwhile. It came before this message, and the caller tries again.

    If lost: resync; the operator gets an error and repeats the call.
    """

    call_id: Ordinal
    reason: ErrorText
    is_outdated: bool = False


class CallFinished(Struct, frozen=True, tag="call_finished"):
    """To the caller: all other heads have done their part, or left.

    If lost: resync; the operator gets an error and repeats the call.
    """

    call_id: Ordinal


class HeadLeft(Struct, frozen=True, tag="head_left"):
    """Another head left, or timed out.

    If lost: resync.
    """

    head_id: HeadId


class SessionLost(Struct, frozen=True):
    """Not on the wire: a head's client reports that the coordinator is silent. The last list remains valid."""


CallMessageFromHead = FleetCall | CallDone | FleetState
FromHead = Hello | Beat | WorkReport | CallMessageFromHead | Bye
CallMessageToHead = RelayedCall | CallRefused | CallFinished | FleetState
SessionEvent = Welcome | FullList | ListDelta | HeadWork | HeadLeft | CallMessageToHead | SessionLost
ToHead = Welcome | SessionRefused | FullList | ListDelta | HeadWork | HeadLeft | CallMessageToHead

_encoder = msgspec.json.Encoder()
_from_head: msgspec.json.Decoder[FromHead | HeadQuery] = msgspec.json.Decoder(FromHead | HeadQuery)
_head_info: msgspec.json.Decoder[tuple[HeadInfo]] = msgspec.json.Decoder(tuple[HeadInfo])
_to_head: msgspec.json.Decoder[list[ToHead]] = msgspec.json.Decoder(list[ToHead])
_anything = msgspec.json.Decoder()
_DEEPER, _NO_DEEPER = b"[" * 64, b"]" * 64


def is_of_head(frame: bytes) -> bool:
    """Whether a frame claims to be from a head, or to be a node's query. Events of replicas begin otherwise."""
    return frame.startswith(_HEAD_PREFIX)


def encode_from_head(message: FromHead | HeadQuery) -> bytes:
    """Return the frame of ``message``. Raises `WireError` if the coordinator would refuse it."""
    return encode_strictly(message, _from_head, "message of a head", MAX_HEAD_FRAME_BYTES)


def decode_from_head(frame: bytes) -> FromHead | HeadQuery:
    """Return the message in ``frame``. Raises `WireError` with the field and its fault, as all decoders here do."""
    return decode_strictly(_from_head, frame, "message of a head", MAX_HEAD_FRAME_BYTES)


def encode_to_head(message: ToHead | HeadInfo) -> Raw:
    """Encode a message for `frames_to_head`, which may put it into any number of frames."""
    return Raw(_encoder.encode(message))


def require_flat(value: Any) -> None:
    """Raise `WireError` if a value is nested so deeply that a reader could refuse its frame."""
    try:
        # A margin: the limit depends on the reader's stack.
        decode_strictly(_anything, _DEEPER + _encoder.encode(value) + _NO_DEEPER, "value", MAX_FRAME_TO_HEAD_BYTES)
    except RecursionError as error:
        raise WireError(f"value: {error}") from error


def frames_to_head(messages: Iterable[Raw]) -> Iterator[bytes]:
    """Yield frames with these messages in order, each of at most `SHARED_FRAME_BYTES` or with one message."""
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
    return decode_strictly(_to_head, frame, "frame to a head", MAX_FRAME_TO_HEAD_BYTES)


def decode_head_info(frame: bytes) -> HeadInfo:
    (info,) = decode_strictly(_head_info, frame, "answer to a head query", MAX_FRAME_TO_HEAD_BYTES)
    return info
