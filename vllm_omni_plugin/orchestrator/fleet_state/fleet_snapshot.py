"""What operators have told the fleet, as one head has followed it: taken as a snapshot, and adopted from one."""

from collections.abc import Coroutine
from typing import Any, Protocol

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import FleetState, StageState
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.orchestrator.fleet_state.fan_out import FanOut
from vllm_omni_plugin.orchestrator.fleet_state.front_update import FrontView, tell
from vllm_omni_plugin.orchestrator.pool.member_changes import ADMIN_HOLD, Head


class CallingHead(Head, Protocol):
    """A head whose operators call all replicas."""

    @property
    def fan_out(self) -> FanOut: ...


def snapshot_of(head: CallingHead, number: int) -> FleetState:
    """The state that this head has followed up to the call of this number."""
    stages = [stage.shared.snapshot(stage_id) for stage_id, stage in enumerate(head.fan_out.stages)]
    return FleetState(number, stages, sorted(head.drained))


def adopt(head: CallingHead, state: FleetState) -> list[Coroutine[Any, Any, None]]:
    """Take the fleet's state for this head's.

    Returns:
        What tells the replicas that only this head reaches, and AsyncLLM's side, of the differences.

    Raises:
        WireError: it is none of a fleet like this one.
    """
    stages = head.fan_out.stages
    told = {stage.stage_id: stage for stage in state.stages}
    if max(told, default=0) >= len(stages):
        raise WireError(f"a state of stage {max(told)}: this head has {len(stages)} stages")
    before = FrontView.of([stage.shared for stage in stages])
    missed = [stage.adopt(told.get(i, StageState(i, [], False))) for i, stage in enumerate(stages)]
    _adopt_drained(head, set(state.drained))
    difference = before.difference(FrontView.of([stage.shared for stage in stages]))
    telling = [stage.catch_up(calls) for stage, calls in zip(stages, missed, strict=True) if calls]
    return [*telling, tell(head.tell_front, difference)]


def _adopt_drained(head: Head, drained: set[ReplicaKey]) -> None:
    head.drained.clear()
    head.drained.update(drained)
    for pool in head.stage_pools:
        for member in pool.members:
            if member.remote and ReplicaKey.of(member) in drained:
                pool.hold_back(member, ADMIN_HOLD)
            elif member.remote:
                head.release_hold(member, ADMIN_HOLD)
