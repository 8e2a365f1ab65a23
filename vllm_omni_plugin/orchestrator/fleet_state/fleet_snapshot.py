"""What operators have told the fleet, as one head has followed it: taken as a snapshot, and adopted from one."""

from collections.abc import Coroutine
from typing import Any

from vllm_omni_plugin.coordinator.protocol.head_messages import FleetState, StageState
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.orchestrator.fleet_state.front_update import FrontView, tell
from vllm_omni_plugin.orchestrator.fleet_state.member_changes import adopt_drained
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator


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
    before = FrontView.of([stage.shared for stage in stages])
    missed = [stage.adopt(told.get(i, StageState(i, [], False))) for i, stage in enumerate(stages)]
    adopt_drained(orchestrator, set(state.drained))
    difference = before.difference(FrontView.of([stage.shared for stage in stages]))
    telling = [stage.catch_up(calls) for stage, calls in zip(stages, missed, strict=True) if calls]
    return [*telling, tell(orchestrator.output_async_queue.give, difference)]
