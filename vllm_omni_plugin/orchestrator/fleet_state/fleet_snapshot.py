"""What operators have told the fleet, as one head has followed it: done with replicas, taken as a snapshot, adopted."""

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import FleetState, StageState
from vllm_omni_plugin.coordinator.state.call_log import update_drained
from vllm_omni_plugin.errors import ReplicaError, WireError
from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import EngineStateView, tell
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_HOLD, PoolMember


def manage(orchestrator: Orchestrator, action: str, member: PoolMember) -> None:
    """Do with a replica what an operator wants; see `ManageReplica`.

    Raises:
        ReplicaError: it cannot be told.
    """
    if action == "drain":
        orchestrator.hold_back(member, ADMIN_HOLD)
    elif action == "resume":
        orchestrator.release_hold(member, ADMIN_HOLD)
    else:
        assert member.leave is not None
        member.leave()


def manage_by_key(orchestrator: Orchestrator, action: str, key: ReplicaKey) -> None:
    """Do with a replica of another process what an operator wants who told another head. It need not be here."""
    update_drained(action, key, orchestrator.drained)
    for pool in orchestrator.stage_pools:
        for member in pool.members:
            if member.remote and ReplicaKey.of(member) == key:
                # Who is not attached to it has nobody to tell, and another head has told it.
                with suppress(ReplicaError):
                    manage(orchestrator, action, member)


def adopt_drained(orchestrator: Orchestrator, drained: set[ReplicaKey]) -> None:
    """These replicas of other processes, and no others, are drained."""
    orchestrator.drained.clear()
    orchestrator.drained.update(drained)
    for pool in orchestrator.stage_pools:
        for member in pool.members:
            if member.remote:
                manage(orchestrator, "drain" if ReplicaKey.of(member) in drained else "resume", member)


def snapshot_of(orchestrator: Orchestrator, number: int) -> FleetState:
    """The state that this head has followed up to the call of this number."""
    stages = [stage.shared.snapshot(stage_id) for stage_id, stage in enumerate(orchestrator.stage_calls)]
    return FleetState(number, stages, sorted(orchestrator.drained))


def adopt(orchestrator: Orchestrator, state: FleetState) -> list[Coroutine[Any, Any, None]]:
    """Take the fleet's state for this head's.

    Returns:
        What tells the replicas that only this head reaches, and AsyncLLM's side, of the differences.

    Raises:
        WireError: it is none of a fleet like this one.
    """
    stages = orchestrator.stage_calls
    told = {stage.stage_id: stage for stage in state.stages}
    if max(told, default=0) >= len(stages):
        raise WireError(f"a state of stage {max(told)}: this head has {len(stages)} stages")
    before = EngineStateView.of([stage.shared for stage in stages])
    missed = [stage.adopt(told.get(i, StageState(i, [], False))) for i, stage in enumerate(stages)]
    adopt_drained(orchestrator, set(state.drained))
    difference = before.difference(EngineStateView.of([stage.shared for stage in stages]))
    telling = [stage.catch_up(calls) for stage, calls in zip(stages, missed, strict=True) if calls]
    return [*telling, tell(orchestrator.output_async_queue.give, difference)]
