"""The fleet's document at one head: changed by calls, replaced by later ones, applied to replicas and front end."""

import asyncio
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.call_effects import changed
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, StageState, next_version
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import EngineStateUpdate
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, PoolMember
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

MAX_DRAINED_BYTES = 128 * 1024
"""What drained replicas may take in the document: 1,000 with the longest IPv6 addresses, 2,000 with IPv4 ones. Beyond
it, those drained first are forgotten, unless this head lists them."""


class FleetDocument:
    """Owns the document, which is immutable. Lives on the orchestrator's loop."""

    def __init__(self, orchestrator: Orchestrator, head_id: str) -> None:
        self._orchestrator = orchestrator
        self._stages = orchestrator.stage_calls
        self._head_id = head_id
        self.state = FleetState()

    @property
    def adapters(self) -> dict[int, Adapter]:
        """The adapters that requests can name, by id."""
        return {adapter.lora_int_id: adapter for stage in self.state.stages for adapter in stage.adapters}

    def after_call(
        self, method: str, args: tuple[Any, ...], stage_ids: Collection[int], fresh: Collection[int] = ()
    ) -> FleetState:
        """The next document, after a call that these stages accepted. `fresh`: where no engine had the weights."""
        version = next_version(self.state.version)
        stages = [*self.state.stages]
        stages += [StageState() for _ in range(len(stages), max(stage_ids, default=-1) + 1)]
        for stage_id in stage_ids:
            # The name of new weights is unique, also among fleets that have used the same engine one after the other.
            weights = f"{version} of {self._head_id}"
            stages[stage_id] = changed(stages[stage_id], method, args, weights, stage_id in fresh)
        return replace(self.state, version=version, head_id=self._head_id, stages=tuple(stages))

    def after_action(self, action: str, key: ReplicaKey) -> FleetState:
        """The next document, after a replica was drained, resumed or removed."""
        drained = [each for each in self.state.drained if each != key]
        drained += [key] if action == "drain" else []
        listed = {ReplicaKey.of(member) for member in remote_members(self._orchestrator)}
        # A lost replica is drained when it returns, but most never do: their addresses would fill the document.
        for lost in [each for each in drained if each not in listed]:
            if len(msgspec.json.encode(drained)) <= MAX_DRAINED_BYTES:
                break
            drained.remove(lost)
        version = next_version(self.state.version)
        return replace(self.state, version=version, head_id=self._head_id, drained=tuple(drained))

    def adopt(
        self, state: FleetState, reached: Collection[int]
    ) -> tuple[list["asyncio.Task[None]"], EngineStateUpdate | None]:
        """Replace the document, unless it does not fit this fleet (WireError). Arguments as for `StageCalls.adopt`.

        Returns tasks that tell replicas what they have missed; and what has changed for the front end, if anything.
        """
        if len(state.stages) > len(self._stages):
            raise WireError(f"a state of {len(state.stages)} stages: this head has {len(self._stages)}")
        adapters, level = self.adapters, self.state.of_stage(0).state.sleep_level
        self.state = state
        work = []
        for stage_id, stage in enumerate(self._stages):
            work += stage.adopt(state.of_stage(stage_id), reached)
        for member in remote_members(self._orchestrator):
            drains = ReplicaKey.of(member) in state.drained
            (self._orchestrator.cordon if drains else self._orchestrator.uncordon)(member, ADMIN_CORDON)
        now, level_now = self.adapters, state.of_stage(0).state.sleep_level
        loaded = tuple(adapter for lora_id, adapter in now.items() if adapters.get(lora_id) != adapter)
        unloaded = tuple(adapters.keys() - now.keys())
        if not loaded and not unloaded and level_now == level:
            return work, None
        return work, EngineStateUpdate(loaded, unloaded, None if level_now == level else level_now, Future())


def remote_members(orchestrator: Orchestrator) -> Iterable[PoolMember]:
    return [member for pool in orchestrator.stage_pools for member in pool.members if member.remote]
