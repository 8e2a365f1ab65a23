"""The state that operator calls have left in the fleet: taken as a snapshot, and adopted from one."""

from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import FleetState, StageState
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import EngineStateUpdate, notify_state_change
from vllm_omni_plugin.orchestrator.fleet_state.replica_actions import apply_action
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCalls
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter


def snapshot_of(orchestrator: Orchestrator, number: int) -> FleetState:
    """The state of this head after the call of this number."""
    stages = [stage.shared.snapshot(stage_id) for stage_id, stage in enumerate(orchestrator.stage_calls)]
    return FleetState(number, stages, sorted(orchestrator.drained))


def adopt(orchestrator: Orchestrator, state: FleetState) -> list[Coroutine[Any, Any, None]]:
    """Replace this head's state by the fleet's.

    Returns:
        Coroutines that send the differences to the replicas of this node and to AsyncLLM.

    Raises:
        WireError: the state does not fit this fleet.
    """
    stages = orchestrator.stage_calls
    states = {stage.stage_id: stage for stage in state.stages}
    if max(states, default=0) >= len(stages):
        raise WireError(f"a state of stage {max(states)}: this head has {len(stages)} stages")
    adapters, sleep_level = _adapters(stages), stages[0].shared.sleep_level
    missed = [stage.adopt(states.get(i, StageState(i, [], False))) for i, stage in enumerate(stages)]
    _adopt_drained(orchestrator, set(state.drained))
    update = _update(adapters, sleep_level, _adapters(stages), stages[0].shared.sleep_level)
    catching_up = [stage.catch_up(calls) for stage, calls in zip(stages, missed, strict=True) if calls]
    return [*catching_up, notify_state_change(orchestrator.front_end.give, update)]


def _adopt_drained(orchestrator: Orchestrator, drained: set[ReplicaKey]) -> None:
    orchestrator.drained.clear()
    orchestrator.drained.update(drained)
    for pool in orchestrator.stage_pools:
        for member in pool.members:
            if member.remote:
                apply_action(orchestrator, "drain" if ReplicaKey.of(member) in drained else "resume", member)


def _adapters(stages: Sequence[StageCalls]) -> dict[int, Adapter]:
    return {adapter.lora_int_id: adapter for stage in stages for adapter in stage.shared.adapters}


def _update(
    before: dict[int, Adapter], level_before: int, now: dict[int, Adapter], level_now: int
) -> EngineStateUpdate | None:
    loaded = tuple(adapter for lora_id, adapter in now.items() if before.get(lora_id) != adapter)
    unloaded = tuple(before.keys() - now.keys())
    level = level_now if level_now != level_before else None
    return EngineStateUpdate(loaded, unloaded, level, Future()) if loaded or unloaded or level is not None else None
