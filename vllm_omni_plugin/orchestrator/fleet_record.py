"""Everything that administrators have told a fleet: what one head knows of it, and takes over from another."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.orchestrator.engine_calls import decode_all
from vllm_omni_plugin.orchestrator.fan_out import FanOut
from vllm_omni_plugin.orchestrator.membership import ADMIN_HOLD, RemoteKeeper, key_of
from vllm_omni_plugin.orchestrator.peer_messages import FleetRecord, Mark, RemoteKey, StageRecord, Stamp, mark_of
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.told_elsewhere import FrontView, tell


class Head(Protocol):
    """This head; `Orchestrator` in service."""

    @property
    def stage_pools(self) -> Sequence[StagePool]: ...

    @property
    def fan_out(self) -> FanOut: ...

    @property
    def drained(self) -> set[ReplicaKey]: ...

    @property
    def remote_replicas(self) -> RemoteKeeper | None: ...

    def tell_front(self, item: Any) -> None: ...


class RecordKeeper:
    """How far this head is, and how it gets further.

    Args:
        head: this head.
        head_id: its id.

    Attributes:
        stamp: of the last change that it made or heard of.
        adopted: the version of the last record that it took from another head.
        contested: whether heads have made changes without knowing of each other's, so that they differ in their order.
        told: replicas that other heads have told everything so far, and this one has not attached to since.
    """

    def __init__(self, head: Head, head_id: str) -> None:
        self.stamp = Stamp(0, "")
        self.adopted = 0
        self.contested = False
        self.told: set[Mark] = set()
        self._head = head
        self._head_id = head_id

    def advance(self) -> Stamp:
        """This head makes a change. Returns how far it was before."""
        before, self.stamp = self.stamp, self.stamp.next(self._head_id)
        return before

    def hear(self, after: Stamp, head_id: str) -> bool:
        """Another head makes a change.

        Args:
            after: how far that one was before.
            head_id: which.

        Returns:
            Whether this head knows what that one knew.
        """
        if after.version > self.stamp.version:
            return False
        self.contested |= after != self.stamp and after.version >= self.adopted
        self.stamp = max(self.stamp, after.next(head_id))
        return True

    def take(self) -> FleetRecord:
        """What this head knows."""
        stages = self._head.fan_out.stages
        records = []
        for stage in stages:
            replay = [(method, msgspec.to_builtins(list(args))) for method, args in stage.shared.replay()]
            records.append(StageRecord(replay, stage.shared.unreplayable is not None))
        told = [mark_of(member) for stage in stages for member in stage.members if member.remote]
        return FleetRecord(self.stamp, records, [RemoteKey(*key) for key in self._head.drained], told)

    def adopt(self, record: FleetRecord) -> "asyncio.Future[Any]":
        """Take another head's record for this one's.

        Returns:
            What is done when this head's replicas and AsyncLLM's side have been told.

        Raises:
            WireError: it is none of a fleet like this one. Nothing has changed.
        """
        stages = self._head.fan_out.stages
        replays = [decode_all(stage.replay) for stage in record.stages]
        if len(replays) != len(stages):
            raise WireError(f"a record of {len(replays)} stages, and there are {len(stages)}")
        before = FrontView.of([stage.shared for stage in stages])
        missed = [
            stage.adopt(replay, part.unreplayable)
            for stage, replay, part in zip(stages, replays, record.stages, strict=True)
        ]
        self.stamp, self.adopted, self.told = record.stamp, record.stamp.version, set(record.told)
        self.contested = False
        self._adopt_drained({ReplicaKey(*key) for key in record.drained})
        news = before.difference(FrontView.of([stage.shared for stage in stages]))
        told = frozenset(self.told)
        return asyncio.gather(
            *(stage.catch_up(calls, told) for stage, calls in zip(stages, missed, strict=True)),
            tell(self._head.tell_front, news),
        )

    def _adopt_drained(self, drained: set[ReplicaKey]) -> None:
        self._head.drained.clear()
        self._head.drained.update(drained)
        for pool in self._head.stage_pools:
            for member in pool.members:
                if not member.remote:
                    continue
                if key_of(member) in drained:
                    pool.hold_back(member, ADMIN_HOLD)
                else:
                    pool.release_hold(member, ADMIN_HOLD)
