"""What the coordinator says to heads."""

from typing import Any

from msgspec import Raw, Struct

from vllm_omni_plugin.coordinator.head_messages import ErrorText, HeadId, PeerCall, ReplicaWork
from vllm_omni_plugin.coordinator.messages import Address, Ordinal, ReplicaInfo, StageId, WallSeconds


class Seated(Struct, frozen=True, tag="seated"):
    """Everything begins anew: these are the other heads, and the list and their work follow, in full.

    Of a head that has not reported since the coordinator started, what was known of it stands until it does.
    """

    heads: list[HeadId]


class Refused(Struct, frozen=True, tag="refused"):
    """This head gets no seat, and is told so with every beat."""

    reason: ErrorText


class WorkWanted(Struct, frozen=True, tag="work_wanted"):
    """The coordinator does not know all that this head has in flight."""


class NumbersWanted(Struct, frozen=True, tag="numbers_wanted"):
    """The coordinator has just started, and asks by which numbers replicas are known."""


class FullList(Struct, frozen=True, tag="full_list"):
    """The replicas of all stages, as in `ReplicaList`.

    Attributes:
        version: 1 for the first list of an epoch, one more for each that follows.
        replicas: Rows that take new work. Here and in `ListDelta`, `last_heartbeat` is of when the row last changed.
        no_new_work: Rows that do not.
        timestamp: Wall-clock seconds since the epoch.
    """

    version: Ordinal
    replicas: list[ReplicaInfo]
    no_new_work: list[ReplicaInfo]
    timestamp: WallSeconds


class ListDelta(Struct, frozen=True, tag="list_delta"):
    """What makes a list out of the one before it.

    Attributes:
        version: Of the list that it makes.
        replicas: New or changed rows that take new work.
        no_new_work: New or changed rows that do not.
        removed: Keys of the rows that are gone: stage, input and output address.
        timestamp: Of the list that it makes.
    """

    version: Ordinal
    replicas: list[ReplicaInfo]
    no_new_work: list[ReplicaInfo]
    removed: list[tuple[StageId, Address, Address]]
    timestamp: WallSeconds


class PeerWork(Struct, frozen=True, tag="work"):
    """What another head has in flight: all of it (`full`), or what changed."""

    head_id: HeadId
    full: bool
    work: list[ReplicaWork]


class CallSent(Struct, frozen=True, tag="call_sent"):
    """The heads that a call of this head went to."""

    call_id: Ordinal
    heads: list[HeadId]


class Answered(Struct, frozen=True, tag="answer"):
    """What a head answered to a call of this one."""

    head_id: HeadId
    call_id: Ordinal
    result: Any = None
    error: ErrorText = ""


class HeadLeft(Struct, frozen=True, tag="head_left"):
    """Another head has left, or was silent for too long."""

    head_id: HeadId


ToHead = (
    Seated
    | Refused
    | WorkWanted
    | NumbersWanted
    | FullList
    | ListDelta
    | PeerWork
    | PeerCall
    | CallSent
    | Answered
    | HeadLeft
)


class Delivery(Struct, frozen=True):
    """One frame for one head.

    Attributes:
        epoch: New for every coordinator.
        sequence: Grows by one with each delivery to a seat.
        messages: Each a `ToHead`. They are decoded one by one, so that none can spoil another. No message: an answer to
            a beat.
    """

    epoch: Ordinal
    sequence: Ordinal
    messages: list[Raw]
