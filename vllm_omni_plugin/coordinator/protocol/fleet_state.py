"""The document of what should be so in the fleet. Operator calls change it, and all heads have the same one.

Each change gives the document the next version. Of two documents the one of the later version counts (`is_later`): at
the coordinator, at a head, and at a replica server, which keeps what its engine was told.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.coordinator.protocol.control_messages import MAX_STAGE_ID, ReplicaKey
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, AdapterId
from vllm_omni_plugin.vllm_api.engine_messages.pause_state import PauseState

VERSIONS = 2**32
"""Versions count up to here and then begin again at 1. No number can be so large that none is left for later calls."""

MAX_STATE_BYTES = 192 * 1024
"""So that a document fits into a frame of 256 KiB, with what goes beside it."""

_MAX_HEAD_ID_CHARS = 128
_MAX_TEXT_CHARS = 4096

Version = Annotated[int, Meta(ge=0, lt=VERSIONS)]
OptionalHeadId = Annotated[str, Meta(max_length=_MAX_HEAD_ID_CHARS)]
_Text = Annotated[str, Meta(max_length=_MAX_TEXT_CHARS)]


class StageState(Struct, frozen=True, omit_defaults=True):
    """What the engines of one stage should have. The defaults are what an engine has at its start.

    Attributes:
        adapters: those that requests can name.
        pinned: ids of adapters that engines keep in memory.
        weight_version: None: an operator has not set it.
        weights: names the last update of weights at run time; "": there was none.
        are_files: whether an engine that starts has these weights.
        is_complete: whether all engines that took this update have the same weights, whichever they had before.
        reads_other_files: whether a reload without a path reads other files than a fresh engine does.
        is_updating: whether an update of the whole model is open, which may also be one of its draft model only.
    """

    adapters: tuple[Adapter, ...] = ()
    pinned: tuple[AdapterId, ...] = ()
    pause: PauseState = msgspec.field(default_factory=PauseState)
    weight_version: _Text | None = None
    weights: _Text = ""
    are_files: bool = True
    is_complete: bool = False
    reads_other_files: bool = False
    is_updating: bool = False

    @property
    def is_paused(self) -> bool:
        """Whether the engines schedule no requests, because they are paused or asleep."""
        return self.pause.pause_mode is not None or bool(self.pause.asleep)

    @property
    def sleep_level(self) -> int:
        """The sleep level of the engines' weights; 0 when they are awake."""
        return self.pause.sleep_level if "weights" in self.pause.asleep else 0


class FleetState(Struct, frozen=True, tag="fleet_state", omit_defaults=True):
    """The document. Also a message: the coordinator's to a head, or that of a head that has a later one.

    Attributes:
        version: 0: no operator has changed anything yet.
        head_id: the head whose operator made the last change.
        stages: by stage id. Stages at the end may be missing; nothing was changed there.
        drained: keys of the replicas that an operator drained.

    If lost: the next resync has or requests it.
    """

    version: Version = 0
    head_id: OptionalHeadId = ""
    stages: Annotated[tuple[StageState, ...], Meta(max_length=MAX_STAGE_ID + 1)] = ()
    drained: tuple[ReplicaKey, ...] = ()

    def of_stage(self, stage_id: int) -> "ReplicaState":
        state = self.stages[stage_id] if stage_id < len(self.stages) else StageState()
        return ReplicaState(self.version, self.head_id, state)


class ReplicaState(Struct, frozen=True, omit_defaults=True):
    """What the engine of one replica was told: the part of its stage in the document of this version.

    ``state.weights`` are those that the engine has. Version 0: told by nobody, or by heads that have all left.
    """

    version: Version = 0
    head_id: OptionalHeadId = ""
    state: StageState = msgspec.field(default_factory=StageState)


NOTHING_TOLD = ReplicaState()


def is_later(one: FleetState | ReplicaState, other: FleetState | ReplicaState) -> bool:
    """Whether one document counts instead of another.

    Of two changes of the same version, which heads made apart from each other, that of the greater head id counts.
    Versions are compared as serial numbers (RFC 1982), so the next version is later than any other one.
    """
    if not one.version or not other.version:
        return bool(one.version)
    ahead = (one.version - other.version) % (VERSIONS - 1)
    return one.head_id > other.head_id if not ahead else ahead <= VERSIONS // 2 - 1


def next_version(version: int) -> int:
    return version % (VERSIONS - 1) + 1


class StateTooLargeError(OmniError):
    def __init__(self, size: int) -> None:
        super().__init__(
            f"The state of the fleet would take {size} bytes, at most {MAX_STATE_BYTES} are possible: unload adapters "
            "first, or use shorter paths."
        )


def check_size(state: FleetState) -> None:
    size = len(msgspec.json.encode(state))
    if size > MAX_STATE_BYTES:
        raise StateTooLargeError(size)
