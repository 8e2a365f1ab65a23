"""What operator calls leave: the document after them, and the calls that bring an engine to it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_model import EngineModel, RefusedError
from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.call_effects import (
    ABORT_CLIENT_REQUESTS,
    FORGET_LORA,
    REMOVE,
    calls_between,
    changed,
    decode,
    encode,
    leaves_state,
)
from vllm_omni_plugin.coordinator.protocol.fleet_state import StageState
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

MODES = st.sampled_from(["abort", "wait", "keep"])


def lora(number: int, path: str = "/lora") -> Adapter:
    return Adapter(f"lora-{number}", number, path)


def call(name: str, args: st.SearchStrategy[Any] = st.just(())) -> st.SearchStrategy[tuple[str, tuple[Any, ...]]]:  # noqa: B008
    return st.tuples(st.just(name), args)


LORA_IDS = st.integers(1, 3)
CALLS = st.one_of(
    call("add_lora", st.tuples(st.builds(lora, LORA_IDS, st.sampled_from(["/a", "/b"])))),
    call("remove_lora", st.tuples(LORA_IDS)),
    call("pin_lora", st.tuples(LORA_IDS)),
    call("set_weight_version", st.tuples(st.sampled_from(["v1", "v2"]))),
    call("pause_generation", st.tuples(MODES, st.just(True))),
    call("pause_scheduler", st.tuples(MODES, st.just(True))),
    call("resume_scheduler"),
    call("sleep", st.tuples(st.sampled_from([0, 1, 2]), MODES)),
    call("release_kv_cache_memory"),
    call("wake_up"),
    call(
        "wake_up",
        st.tuples(st.sampled_from([None, ["weights"], ["kv_cache"], ["scheduling"], ["weights", "kv_cache"]])),
    ),
)


def after(state: StageState, method: str, args: tuple[Any, ...], all_fresh: bool = False) -> StageState:
    return changed(state, method, args, "new", all_fresh)


def make_call(engine: EngineModel, state: StageState, method: str, args: tuple[Any, ...]) -> StageState:
    """Make one call; returns the state after it, which is the same if the engine refuses it."""
    try:
        engine.apply(method, args)
    except RefusedError:
        return state
    return after(state, method, args)


def told(engine: EngineModel, calls: list[tuple[str, tuple[Any, ...]]]) -> EngineModel:
    for method, args in calls:
        engine.apply(method, args)
    return engine


def rests(engine: EngineModel) -> bool:
    return engine.pause is not None or bool(engine.asleep)


@given(st.lists(CALLS, max_size=12))
def test_a_fresh_engine_gets_the_state_of_those_that_got_every_call(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    engine, state = EngineModel(), StageState()
    for method, args in calls:
        state = make_call(engine, state, method, args)
        assert told(EngineModel(), calls_between(StageState(), state, False)) == engine


@given(st.lists(CALLS, max_size=8), st.lists(CALLS, max_size=8))
def test_an_engine_that_missed_calls_gets_the_state_of_the_others_but_keeps_its_adapters(
    before: list[tuple[str, tuple[Any, ...]]], missed: list[tuple[str, tuple[Any, ...]]]
) -> None:
    engine, late, state = EngineModel(), EngineModel(), StageState()
    for method, args in before:
        make_call(late, state, method, args)
        state = make_call(engine, state, method, args)
    known = state
    for method, args in missed:
        state = make_call(engine, state, method, args)
    told(late, calls_between(known, state, rests(late)))
    assert (late.weight_version, late.pause, late.refuses, late.asleep) == (
        engine.weight_version,
        engine.pause,
        engine.refuses,
        engine.asleep,
    )
    assert {adapter.lora_int_id: adapter for adapter in state.adapters}.items() <= late.loras.items()
    assert set(state.pinned) <= late.pinned
    assert calls_between(state, state, rests(engine)) == []


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_what_an_engine_has_missed_of_a_pause_drops_no_requests_or_caches(mode: str) -> None:
    paused = after(StageState(), "pause_generation", (mode, True))
    assert calls_between(StageState(), paused, False) == [("pause_generation", ("wait", False))]


SLEEP, RESUME = ("sleep", (1, "abort")), ("resume_scheduler", ())


@pytest.mark.parametrize(
    ("calls", "is_resting", "expected"),
    [
        ([], True, []),
        ([("set_weight_version", ("v",))], True, [("set_weight_version", ("v",))]),
        ([SLEEP], True, [("sleep", (1, "wait"))]),
        ([SLEEP, ("wake_up", ())], True, [("wake_up", (None,))]),
        ([("pause_scheduler", ("keep",)), RESUME], True, [("wake_up", (None,))]),
        ([("pause_scheduler", ("keep",)), RESUME], False, []),
    ],
)
def test_an_engine_found_at_rest_stays_so_unless_an_operator_has_ended_that(
    calls: list[tuple[str, tuple[Any, ...]]], is_resting: bool, expected: list[Any]
) -> None:
    state = StageState()
    for method, args in calls:
        state = after(state, method, args)
    assert calls_between(StageState(), state, is_resting) == expected


def test_a_forgotten_adapter_is_told_to_nobody_and_cannot_be_pinned() -> None:
    state = after(StageState(), "add_lora", (lora(1),))
    state = after(after(state, "pin_lora", (1,)), FORGET_LORA, (1,))
    assert state == after(state, "pin_lora", (1,)) == StageState()


def test_an_adapter_that_is_loaded_in_place_is_not_loaded_in_place_again() -> None:
    adapter = Adapter("a", 1, "/a", load_inplace=True)
    assert after(StageState(), "add_lora", (adapter,)).adapters == (Adapter("a", 1, "/a"),)


def rpc(method: str, **named: Any) -> tuple[Any, ...]:
    return (method, None, (), named)


@pytest.mark.parametrize(
    ("before", "method", "named", "all_fresh", "complete", "files"),
    [
        (["start_weight_update", "update_weights"], "finish_weight_update", {}, False, True, False),
        (["start_draft_weight_update", "update_weights"], "finish_weight_update", {}, False, False, False),
        (["start_weight_update", "finish_weight_update"], "finish_weight_update", {}, False, False, False),
        (["start_weight_update"], "update_weights", {}, False, False, False),
        ([], "start_weight_update", {}, False, False, False),
        ([], "start_draft_weight_update", {}, False, False, False),
        ([], "reset_weights", {}, False, False, False),
        (["update_weights"], "reload_weights", {}, False, True, True),
        (["reload_weights /other"], "reload_weights", {}, False, False, False),
        (["reload_weights /other"], "reload_weights", {}, True, True, False),
        (["reload_weights /other"], "reload_weights", {"weights_path": "/new"}, False, True, False),
    ],
)
def test_which_updates_give_all_engines_the_same_weights_and_which_those_of_the_files(
    before: list[str], method: str, named: dict[str, Any], all_fresh: bool, complete: bool, files: bool
) -> None:
    state = StageState()
    for each in before:
        name, _, path = each.partition(" ")
        state = after(state, "collective_rpc", rpc(name, **({"weights_path": path} if path else {})))
    state = after(state, "collective_rpc", rpc(method, **named), all_fresh)
    assert (state.weights, state.is_complete, state.are_files) == ("new", complete, files)


SHARED: list[tuple[Any, ...]] = [
    ("add_lora", Adapter("story", 7, "/loras/story", None, True)),
    ("remove_lora", 7),
    (ABORT_CLIENT_REQUESTS, ["cmpl-1-0"]),
    (REMOVE, ReplicaKey(0, "in", "out")),
    ("pause_scheduler", "abort", True),
    ("wake_up", ["weights", "kv_cache"]),
    ("release_kv_cache_memory",),
    ("collective_rpc", "update_weights", None, [], {"update_info": {"names": ["w"]}}),
    ("collective_rpc", "check_health", 1.5, [1], {}),
    ("reset_prefix_cache", False, True),
    ("profile", True, None, None, None, {"with_stack": True}),
]


@pytest.mark.parametrize("shared", SHARED, ids=lambda shared: "-".join(map(str, shared[:2])))
def test_encoded_arguments_decode_to_the_same_arguments(shared: tuple[Any, ...]) -> None:
    method, *args = shared
    plain = encode(method, args)
    assert decode(method, msgspec.json.decode(msgspec.json.encode(plain))) == tuple(args)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("is_sleeping", ()),
        (FORGET_LORA, (7,)),
        ("collective_rpc", ("release_late_interaction_query_cache", None, [["q"]], {})),
        ("collective_rpc", (print, None, (), {})),
        ("collective_rpc", ("update_weights", None, [object()], {})),
        ("collective_rpc", ("update_weights", None, ["x" * 200_000], {})),
        ("add_lora", (object(),)),
    ],
)
def test_queries_and_what_is_not_plain_are_not_for_other_heads(method: str, args: tuple[Any, ...]) -> None:
    assert encode(method, args) is None


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("shutdown", []),
        ("add_lora", [["a", 1, ""]]),
        ("add_lora", []),
        (ABORT_CLIENT_REQUESTS, ["a"]),
        (REMOVE, [[0, "", "x"]]),
    ],
)
def test_an_invalid_call_of_another_head_is_an_error(method: str, arguments: list[Any]) -> None:
    with pytest.raises(WireError, match=method):
        decode(method, arguments)


@pytest.mark.parametrize(
    ("method", "args"), [("collective_rpc", ("check_health",)), ("profile", (True,)), ("is_sleeping", ())]
)
def test_calls_that_leave_nothing(method: str, args: tuple[Any, ...]) -> None:
    assert not leaves_state(method, args)
