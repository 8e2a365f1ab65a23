"""What heads say to the coordinator, and through it to one another.

A head's frames are objects whose first key is ``type``, which no replica's announcement is. The coordinator's own words
are in `deliveries`.
"""

from hashlib import blake2b
from typing import Annotated, Any

from msgspec import Meta, Struct

from vllm_omni_plugin.coordinator.messages import Address, Ordinal, QueueLength, ReplicaId, StageId

SEAT_PROTOCOL = 1
"""Of what heads, the coordinator and through it the heads say to each other. Ends that differ do not work together."""

MAX_HEAD_ID_CHARS = 128
MAX_METHOD_CHARS = 128
MAX_ERROR_CHARS = 4096
# As many as every reader of JSON takes for exact integers.
ENGINE_KEYS = 2**53
# A frame of so many rows with addresses of the greatest length is not larger than a head's frame may be.
ROWS_PER_FRAME = 400

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


class ReplicaNumber(Struct, frozen=True, array_like=True, gc=False):
    """The number by which a head knows a replica."""

    stage_id: StageId
    input_addr: Address
    output_addr: Address
    replica_id: ReplicaId


class PeerCall(Struct, frozen=True, tag="call"):
    """A call from another head.

    Attributes:
        head_id: Who asks.
        call_id: That head's number of it.
        method: What is asked.
        arguments: Plain JSON.
    """

    head_id: HeadId
    call_id: Ordinal
    method: Method
    arguments: Any = None


class PeerAnswer(Struct, frozen=True):
    """What became of a call at one other head.

    Attributes:
        head_id: Which head.
        result: Its answer, plain JSON.
        error: Why it failed or did not answer; empty if it answered.
    """

    head_id: HeadId
    result: Any = None
    error: ErrorText = ""


class Beat(Struct, frozen=True, tag="beat"):
    """A head is there; the first of a connection takes a seat.

    Attributes:
        head_id: Its own id.
        seat: Grows whenever it asks for another seat, so that what is left of an older connection is recognised.
        work_sequence: The number of its last `Work`.
        anew: Whether it has missed something, and wants to be told everything again.
        protocol: `SEAT_PROTOCOL` of the head.
    """

    head_id: HeadId
    seat: Ordinal
    work_sequence: Ordinal
    anew: bool
    protocol: Ordinal


class Work(Struct, frozen=True, tag="work"):
    """What a head has in flight.

    Attributes:
        sequence: Grows by one with each of these frames of a head.
        full: Whether replicas that are not in it have nothing; otherwise it has those that changed.
        work: By replica.
    """

    sequence: Ordinal
    full: bool
    work: Annotated[list[ReplicaWork], Meta(max_length=ROWS_PER_FRAME)]


class Numbers(Struct, frozen=True, tag="numbers"):
    """The numbers by which a head has known replicas, for a coordinator that has just started."""

    numbers: Annotated[list[ReplicaNumber], Meta(max_length=ROWS_PER_FRAME)]


class Call(Struct, frozen=True, tag="call"):
    """A call to all other heads; `PeerCall` where it arrives."""

    call_id: Ordinal
    method: Method
    arguments: Any = None


class Answer(Struct, frozen=True, tag="answer"):
    """An answer to the call of head ``head_id``; `Answered` where it arrives."""

    head_id: HeadId
    call_id: Ordinal
    result: Any = None
    error: ErrorText = ""


class Bye(Struct, frozen=True, tag="bye"):
    """The head leaves."""


FromHead = Beat | Work | Numbers | Call | Answer | Bye
