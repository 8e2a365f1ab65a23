"""The fleet's document: which of two counts, and how the coordinator keeps it and passes calls on. Without sockets."""

import pytest
from msgspec.structs import asdict, replace

from vllm_omni_plugin.coordinator.protocol.fleet_state import (
    VERSIONS,
    FleetState,
    StageState,
    StateTooLargeError,
    check_size,
    is_later,
    next_version,
)
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    CallDone,
    CallFinished,
    CallRefused,
    FleetCall,
    RelayedCall,
    decode_from_head,
    encode_from_head,
)
from vllm_omni_plugin.coordinator.state.relayed_calls import MAX_OPEN_CALLS, RelayedCalls
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

HEADS = ["a", "b", "c"]
LAST = VERSIONS - 1
CALL = FleetCall(1, "reset_mm_cache", [], [0], reached=[7])


def state(version: int, head_id: str = "a", weights: str = "v") -> FleetState:
    return FleetState(version, head_id, (StageState(weight_version=weights),))


def change(base: FleetState, head_id: str, call_id: int = 1) -> FleetCall:
    after = state(next_version(base.version), head_id, head_id)
    return FleetCall(call_id, state=after, base_version=base.version, base_head=base.head_id)


@pytest.mark.parametrize(
    ("one", "other", "later"),
    [
        ((0, ""), (0, ""), False),
        ((1, "a"), (0, ""), True),
        ((2, "a"), (1, "b"), True),
        ((1, "b"), (2, "a"), False),
        ((2, "b"), (2, "a"), True),
        ((2, "a"), (2, "a"), False),
        ((1, "a"), (LAST, "b"), True),
        ((LAST, "b"), (1, "a"), False),
        ((0, ""), (LAST, "a"), False),
        ((3, "a"), (2**31 + 2, "b"), False),
        ((3, "a"), (2**31 + 3, "b"), True),
    ],
)
def test_which_of_two_documents_counts(one: tuple[int, str], other: tuple[int, str], later: bool) -> None:
    assert is_later(FleetState(*one), FleetState(*other)) is later


@pytest.mark.parametrize("version", [0, 1, 2**31 - 1, 2**31, LAST - 1, LAST])
def test_the_next_version_is_later_than_any_one(version: int) -> None:
    assert is_later(FleetState(next_version(version), "a"), FleetState(version, "z"))


def test_a_document_that_is_too_large_is_refused_and_the_largest_fits_into_a_frame() -> None:
    adapters = [Adapter(f"adapter-{number}", number + 1, f"/adapters/{number:0100}") for number in range(5000)]
    with pytest.raises(StateTooLargeError, match="unload adapters first"):
        check_size(FleetState(1, "a", (StageState(adapters=tuple(adapters)),)))
    fits = FleetState(1, "a", (StageState(adapters=tuple(adapters[:1200])),))
    check_size(fits)
    call = FleetCall(1, "add_lora", [adapters[0]], [0], fits, 1, "a" * 128, [2**53 - 1] * 1000)
    assert decode_from_head(encode_from_head(call)).state == fits  # type: ignore[union-attr]


def test_a_call_goes_to_all_heads_and_has_finished_when_all_others_are_done() -> None:
    calls = RelayedCalls()
    passed_on = RelayedCall(**asdict(CALL), head_id="a")
    assert calls.handle("a", CALL, HEADS) == [(head, passed_on) for head in HEADS]
    assert calls.handle("b", CallDone(1, "a"), HEADS) == []
    assert calls.handle("b", CallDone(1, "a"), HEADS) == []
    assert calls.handle("x", CallDone(1, "a"), HEADS) == []
    assert calls.handle("c", CallDone(1, "a"), HEADS) == [("a", CallFinished(1))]
    assert calls.handle("c", CallDone(1, "a"), HEADS) == []


def test_nobody_waits_for_a_head_that_has_left_or_lost_its_messages_nor_for_its_calls() -> None:
    calls = RelayedCalls()
    calls.handle("a", CALL, HEADS)
    calls.handle("b", CALL, HEADS)
    calls.handle("c", CallDone(1, "a"), HEADS)
    assert calls.head_resynced("b") == [("a", CallFinished(1))]
    assert calls.head_resynced("a") == calls.head_resynced("c") == []


def test_of_two_changes_at_once_the_second_is_made_again_and_is_the_later() -> None:
    calls = RelayedCalls()
    base = calls.state
    calls.handle("b", change(base, "b"), HEADS)
    known = calls.state
    assert calls.handle("a", change(base, "a", 5), HEADS) == [("a", known), ("a", CallRefused(5, "", True))]
    assert calls.state == known
    calls.handle("a", change(known, "a", 6), HEADS)
    assert (calls.state.version, calls.state.head_id) == (2, "a")


@pytest.mark.parametrize(
    ("version", "head_id", "counts"), [(5, "a", True), (3, "b", True), (3, "a", False), (2, "z", False)]
)
def test_a_later_document_of_a_head_replaces_that_of_the_coordinator(version: int, head_id: str, counts: bool) -> None:
    calls = RelayedCalls()
    calls.handle("c", state(3, "ab"), HEADS)
    reported = state(version, head_id)
    assert calls.handle("a", reported, HEADS) == ([("b", reported), ("c", reported)] if counts else [])
    assert (calls.state == reported) is counts


def test_open_calls_are_bounded() -> None:
    calls = RelayedCalls()
    for number in range(MAX_OPEN_CALLS):
        calls.handle("a", replace(CALL, call_id=number), HEADS)
    refused = CallRefused(1, "1024 calls are under way. Please try again later.")
    assert calls.handle("b", change(calls.state, "b"), HEADS) == [("b", refused)]
    assert calls.state == FleetState()
