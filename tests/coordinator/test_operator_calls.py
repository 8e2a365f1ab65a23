"""Numbers, outcomes and the snapshot of operators' calls, without sockets."""

from typing import Any

import pytest

from vllm_omni_plugin.coordinator.protocol.head_messages import (
    Call,
    CallDone,
    CallFinished,
    CallOutcome,
    CallRefused,
    FleetState,
    NumberedCall,
    StageState,
    TakeOver,
)
from vllm_omni_plugin.coordinator.state.call_log import MAX_OPEN_CALLS, OperatorCalls
from vllm_omni_plugin.errors import WireError

HEADS = ["a", "b", "c"]
PAUSE = Call(1, "pause_scheduler", ["keep", True], [0], [])
DRAIN = Call(2, "drain", [[0, "in", "out"]], [], [])
PAUSED = StageState(0, [("pause_scheduler", ["keep", False])], False)


def replace(call: Call, **fields: Any) -> Call:
    return Call(**{name: fields.get(name, getattr(call, name)) for name in Call.__struct_fields__})


def test_calls_are_numbered_in_the_order_in_which_they_come_and_told_to_all() -> None:
    calls = OperatorCalls()
    told = [calls.take(head, PAUSE, HEADS) for head in "ba"]
    for number, (caller, said) in enumerate(zip("ba", told, strict=True), 1):
        numbered = NumberedCall(number, caller, 1, PAUSE.method, PAUSE.arguments, [0], [])
        assert said == [(head, numbered) for head in HEADS]


def test_the_caller_hears_when_all_others_have_followed_the_outcome_or_left() -> None:
    calls = OperatorCalls()
    calls.take("a", PAUSE, HEADS)
    outcome = CallOutcome(1, [True])
    assert sorted(calls.take("a", outcome, HEADS)) == [("b", outcome), ("c", outcome)]
    assert calls.take("a", outcome, HEADS) == []
    assert calls.take("b", CallDone(1), HEADS) == []
    assert calls.left("c", ["a", "b"]) == [("a", CallFinished(1))]
    assert calls.take("b", CallDone(1), HEADS) == []


def test_the_only_head_waits_for_nobody() -> None:
    calls = OperatorCalls()
    calls.take("a", PAUSE, ["a"])
    assert calls.take("a", CallOutcome(1, [True]), ["a"]) == [("a", CallFinished(1))]


def test_only_the_caller_says_what_became_of_its_call() -> None:
    calls = OperatorCalls()
    calls.take("a", PAUSE, HEADS)
    assert calls.take("b", CallOutcome(1, [False]), HEADS) == []
    assert calls.state.stages == [PAUSED]


def test_the_snapshot_has_what_was_taken_or_is_under_way_and_who_is_drained() -> None:
    calls = OperatorCalls()
    for call in (PAUSE, DRAIN, replace(PAUSE, stages=[2]), replace(PAUSE, stages=[1])):
        calls.take("a", call, HEADS)
    calls.take("a", CallOutcome(4, [False]), HEADS)
    state = calls.state
    assert (state.number, state.drained) == (4, [(0, "in", "out")])
    assert [(stage.stage_id, stage.replay) for stage in state.stages] == [
        (0, PAUSED.replay),
        (2, PAUSED.replay),
        (1, []),
    ]
    calls.take("b", replace(DRAIN, method="resume"), HEADS)
    assert calls.state.drained == []


@pytest.mark.parametrize("call", [PAUSE, Call(1, "add_lora", [["x", 1, "/x"]], [0], [])], ids=lambda call: call.method)
def test_a_call_whose_caller_leaves_is_made_again_by_another_head(call: Call) -> None:
    calls = OperatorCalls()
    calls.take("a", call, HEADS)
    ((head, said),) = calls.left("a", ["b", "c"])
    assert isinstance(said, TakeOver)
    assert (head, said.call.head_id, said.call.number, said.call.told) == ("b", "b", 1, [])
    ((head, said),) = calls.left("b", ["c"])
    assert (head, isinstance(said, TakeOver)) == ("c", True)
    assert calls.take("c", CallOutcome(1, [True]), ["c"]) == [("c", CallFinished(1))]


@pytest.mark.parametrize(
    ("call", "later"),
    [
        (PAUSE, True),
        (DRAIN, False),
        (Call(1, "collective_rpc", ["update_weights", None, [], {}], [0], []), False),
        (Call(1, "profile", [True, None, None, None], [0], []), False),
        (Call(1, "forget_lora", [7], [0], []), False),
    ],
    ids=lambda value: getattr(value, "method", value),
)
def test_a_call_that_may_not_be_repeated_counts_as_taken_when_its_caller_leaves(call: Call, later: bool) -> None:
    calls = OperatorCalls()
    calls.take("a", call, HEADS)
    if later:
        calls.take("b", Call(3, "resume_scheduler", [], [0], []), HEADS)
    outcome = CallOutcome(1, [True] * len(call.stages))
    assert sorted(calls.left("a", ["b", "c"])) == [("b", outcome), ("c", outcome)]


def test_a_coordinator_that_has_just_started_takes_the_newest_state_and_numbers_on() -> None:
    calls = OperatorCalls()
    state = FleetState(7, [PAUSED], [(0, "in", "out")])
    assert calls.take("a", state, HEADS) == [("b", state), ("c", state)]
    assert calls.take("b", FleetState(6, [], []), HEADS) == []
    assert calls.take("b", FleetState(7, [], []), HEADS) == []
    assert calls.state == state
    (_, numbered), *_ = calls.take("c", PAUSE, HEADS)
    assert isinstance(numbered, NumberedCall)
    assert numbered.number == 8


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
def test_what_is_no_call_or_state_is_an_error_and_changes_nothing(message: Any) -> None:
    calls = OperatorCalls()
    calls.take("a", PAUSE, HEADS)
    with pytest.raises(WireError):
        calls.take("a", message, HEADS)
    assert calls.state == FleetState(1, [PAUSED], [])


def test_calls_under_way_are_bounded() -> None:
    calls = OperatorCalls()
    for _ in range(MAX_OPEN_CALLS):
        calls.take("a", DRAIN, HEADS)
    ((head, refused),) = calls.take("b", PAUSE, HEADS)
    assert (head, refused) == ("b", CallRefused(1, "1024 calls are under way. Please try again later."))
