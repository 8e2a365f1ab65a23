"""Numbers, outcomes and the snapshot of operators' calls, without sockets."""

from typing import Any

import pytest
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.head_messages import (
    CallOutcome,
    CallRefused,
    FleetState,
    OperatorCall,
    StageState,
)
from vllm_omni_plugin.coordinator.state.call_log import MAX_OPEN_CALLS, OperatorCalls
from vllm_omni_plugin.errors import WireError

HEADS = ["a", "b", "c"]
PAUSE = OperatorCall(1, "pause_scheduler", ["keep", True], [0], [])
DRAIN = OperatorCall(2, "drain", [[0, "in", "out"]], [], [])
PAUSED = StageState(0, [("pause_scheduler", ["keep", False])], False)


def test_only_the_caller_can_send_the_outcome() -> None:
    calls = OperatorCalls()
    calls.handle("a", PAUSE, HEADS)
    assert calls.handle("b", CallOutcome(1, [False]), HEADS) == []
    assert calls.state.stages == [PAUSED]


def test_the_snapshot_has_accepted_and_open_calls_and_drained_replicas() -> None:
    calls = OperatorCalls()
    for call in (PAUSE, DRAIN, replace(PAUSE, stages=[2]), replace(PAUSE, stages=[1])):
        calls.handle("a", call, HEADS)
    calls.handle("a", CallOutcome(4, [False]), HEADS)
    state = calls.state
    assert (state.number, state.drained) == (4, [(0, "in", "out")])
    assert [(stage.stage_id, stage.replay) for stage in state.stages] == [
        (0, PAUSED.replay),
        (2, PAUSED.replay),
        (1, []),
    ]
    calls.handle("b", replace(DRAIN, method="resume"), HEADS)
    assert calls.state.drained == []


@pytest.mark.parametrize(
    ("call", "later"),
    [
        (PAUSE, True),
        (DRAIN, False),
        (OperatorCall(1, "collective_rpc", ["update_weights", None, [], {}], [0], []), False),
        (OperatorCall(1, "profile", [True, None, None, None], [0], []), False),
        (OperatorCall(1, "forget_lora", [7], [0], []), False),
    ],
    ids=lambda value: getattr(value, "method", value),
)
def test_a_call_that_may_not_be_repeated_counts_as_accepted_when_its_caller_leaves(
    call: OperatorCall, later: bool
) -> None:
    calls = OperatorCalls()
    calls.handle("a", call, HEADS)
    if later:
        calls.handle("b", OperatorCall(3, "resume_scheduler", [], [0], []), HEADS)
    outcome = CallOutcome(1, [True] * len(call.stages))
    assert sorted(calls.head_left("a", ["b", "c"])) == [("b", outcome), ("c", outcome)]


BAD: dict[str, Any] = {
    "an unknown method": replace(PAUSE, method="shutdown"),
    "a question": replace(PAUSE, method="is_sleeping", arguments=[]),
    "too few arguments": replace(PAUSE, arguments=["keep"]),
    "an unknown mode": replace(PAUSE, arguments=["kill", True]),
    "an adapter without a path": replace(PAUSE, method="add_lora", arguments=[["a", 1, ""]]),
    "an adapter of id 0": replace(PAUSE, method="add_lora", arguments=[["a", 0, "p"]]),
    "a replica without an address": replace(DRAIN, arguments=[[0, "", "x"]]),
    "a state of unknown calls": FleetState(9, [StageState(0, [("shutdown", [])], False)], []),
    "a state of calls that leave none": FleetState(9, [StageState(0, [("reset_mm_cache", [])], False)], []),
    "an outcome of other stages": CallOutcome(1, [True, False]),
}


@pytest.mark.parametrize("message", BAD.values(), ids=BAD)
def test_an_invalid_call_or_state_is_an_error_and_changes_nothing(message: Any) -> None:
    calls = OperatorCalls()
    calls.handle("a", PAUSE, HEADS)
    with pytest.raises(WireError):
        calls.handle("a", message, HEADS)
    assert calls.state == FleetState(1, [PAUSED], [])


def test_open_calls_are_bounded() -> None:
    calls = OperatorCalls()
    for _ in range(MAX_OPEN_CALLS):
        calls.handle("a", DRAIN, HEADS)
    ((head, refused),) = calls.handle("b", PAUSE, HEADS)
    assert (head, refused) == ("b", CallRefused(1, "1024 calls are under way. Please try again later."))
