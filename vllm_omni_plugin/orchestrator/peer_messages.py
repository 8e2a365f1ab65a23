"""What heads of one fleet tell each other of an administrator's calls. Plain JSON, strictly decoded."""

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.coordinator import engine_key
from vllm_omni_plugin.coordinator.messages import Address, StageId
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.orchestrator.pool_member import PoolMember

T = TypeVar("T")

ENGINE_CALL = "engine-call"
ENGINE_CALL_OVER = "engine-call-over"
MANAGE = "manage"
STATE = "state"
VERSION = "version"

Mark = Annotated[int, Meta(ge=0)]
"""One start of one replica, the same for all heads; see `mark_of`."""
Action = Literal["drain", "resume", "remove"]
_Number = Annotated[int, Meta(ge=0, le=2**53)]
_Method = Annotated[str, Meta(min_length=1, max_length=128)]


class Stamp(NamedTuple):
    """How far a head is: of two records the one with the greater stamp is the newer.

    Attributes:
        version: grows with each change (Lamport, "Time, clocks, and the ordering of events", 1978).
        head_id: who made the change.
    """

    version: _Number
    head_id: str

    def next(self, head_id: str) -> "Stamp":
        """How far a head is after the next change, its own."""
        return Stamp(self.version + 1, head_id)


class RemoteKey(NamedTuple):
    """A replica that all heads can reach; equal to its `ReplicaKey`."""

    stage_id: StageId
    input_addr: Address
    output_addr: Address


class EngineCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the sender makes of the engines.

    Attributes:
        call: the sender's number of it.
        after: how far the sender was before it; None for a call that leaves nothing behind.
        method: see `engine_calls`.
        arguments: likewise.
        stages: the stages whose engines are called.
        told: the replicas that the sender calls.
    """

    call: _Number
    after: Stamp | None
    method: _Method
    arguments: list[Any]
    stages: list[StageId]
    told: list[Mark]


class EngineCallOver(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of an `EngineCall`.

    Attributes:
        call: its number.
        after: how far the sender was before that; None as there.
        taken: for each of its stages, whether any engine took it.
        failed: replicas that did not take what others took.
        cleared: replicas that dropped their prefix caches.
    """

    call: _Number
    after: Stamp | None
    taken: list[bool]
    failed: list[Mark] = []
    cleared: list[Mark] = []


class Manage(Struct, frozen=True, forbid_unknown_fields=True):
    """The administrator's wish for one replica; see `ManageReplica`.

    Attributes:
        after: how far the sender was before it.
        action: what it shall do.
        replica: which.
    """

    after: Stamp
    action: Action
    replica: RemoteKey


class StageRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """What the engines of one stage were told: `SharedState.replay`, and whether that is not all."""

    replay: list[tuple[str, list[Any]]]
    unreplayable: bool


class FleetRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a head which comes later must know.

    Attributes:
        stamp: how far the answering head is.
        stages: by stage.
        drained: replicas that an operator has drained.
        told: replicas that the answering head knows to have been told all of it.
    """

    stamp: Stamp
    stages: list[StageRecord]
    drained: list[RemoteKey]
    told: list[Mark]


class Version(Struct, frozen=True, forbid_unknown_fields=True):
    """How far the sender is.

    Attributes:
        stamp: of its last change.
        under_way: its calls that have not come to their end.
    """

    stamp: Stamp
    under_way: list[_Number]


def mark_of(member: PoolMember) -> int:
    """A number for the start of a replica that a head is or was attached to."""
    return engine_key(member.stage_id, member.input_addr, member.output_addr, member.incarnation)


def decoded(arguments: Any, kind: type[T]) -> T:
    """Arguments or a result as a message.

    Raises:
        WireError: they are none.
    """
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"not a valid {kind.__name__}: {error}") from error
