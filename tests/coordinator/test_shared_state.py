"""The replay of operator calls to a replica that attaches later, against a model of the engine."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_model import EngineModel, RefusedError
from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA
from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter


def lora(lora_int_id: int, path: str = "p") -> Adapter:
    """An adapter. Two with the same id differ only in the path."""
    return Adapter("name", lora_int_id, path)


CALLS = st.one_of(
    st.tuples(st.just("add_lora"), st.tuples(st.builds(lora, st.integers(1, 3), st.sampled_from("xy")))),
    st.tuples(st.sampled_from(["remove_lora", "pin_lora"]), st.tuples(st.integers(1, 3))),
    st.tuples(st.just("set_weight_version"), st.tuples(st.sampled_from(["v1", "v2"]))),
    st.tuples(
        st.sampled_from(["pause_scheduler", "pause_generation"]),
        st.tuples(st.sampled_from(["abort", "wait", "keep"]), st.booleans()),
    ),
    st.tuples(st.just("sleep"), st.tuples(st.integers(0, 1), st.sampled_from(["abort", "keep"]))),
    st.tuples(st.sampled_from(["resume_scheduler", "release_kv_cache_memory", "wake_up", "profile"]), st.just(())),
    st.tuples(
        st.just("wake_up"),
        st.tuples(st.sampled_from([None, ["weights"], ["kv_cache"], ["scheduling"], ["weights", "kv_cache"]])),
    ),
)


def make_call(engine: EngineModel, shared: SharedState, method: str, args: tuple[Any, ...]) -> None:
    """Record and apply one call, as failed if the engine refuses it."""
    settle = shared.record(method, args)
    try:
        engine.apply(method, args)
    except RefusedError:
        settle(False)
    else:
        settle(True)


def replayed(shared: SharedState) -> EngineModel:
    """Return a fresh engine after the replay."""
    engine = EngineModel()
    for method, args in shared.replay():
        engine.apply(method, args)
    return engine


@given(st.lists(CALLS, max_size=12))
def test_a_replayed_engine_has_the_state_of_those_that_got_every_call(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    engine, shared = EngineModel(), SharedState()
    for method, args in calls:
        make_call(engine, shared, method, args)
        assert replayed(shared) == engine


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_the_replay_of_a_pause_drops_no_requests_or_caches(mode: str) -> None:
    shared = SharedState()
    shared.record("pause_generation", (mode, True))(True)
    assert shared.replay() == [("pause_generation", ("wait", False))]


RL_STEPS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "sleep and wake by parts": [("sleep", (1, "abort")), ("wake_up", (["weights"],)), ("wake_up", (["kv_cache"],))],
    "sleep and wake the cache first": [
        ("sleep", (1, "abort")),
        ("wake_up", (["kv_cache"],)),
        ("sleep", (1, "abort")),
        ("wake_up", (["weights"],)),
    ],
    "sleep and wake all parts by name": [
        ("sleep", (1, "abort")),
        ("wake_up", (["weights", "kv_cache", "scheduling"],)),
    ],
    "wake what is awake": [
        ("release_kv_cache_memory", ()),
        ("wake_up", (["weights", "kv_cache"],)),
        ("wake_up", ()),
    ],
    "refuse and keep": [("pause_generation", ("abort", True)), ("pause_scheduler", ("keep", True))],
    "sleep and wake": [("sleep", (1, "abort")), ("wake_up", ())],
    "pause and resume": [("pause_scheduler", ("keep", True)), ("resume_scheduler", ())],
    "refuse and resume": [("pause_generation", ("abort", True)), ("resume_scheduler", ())],
    "sleep while requests are refused": [("pause_generation", ("wait", True)), ("sleep", (1, "keep"))],
    "resume while asleep": [("sleep", (1, "abort")), ("resume_scheduler", ()), ("pause_scheduler", ())],
    "release the cache": [
        ("pause_scheduler", ("abort", True)),
        ("release_kv_cache_memory", ()),
        ("wake_up", (["kv_cache"],)),
    ],
    "reload one adapter": [("add_lora", (lora(1),)), ("pin_lora", (1,)), ("remove_lora", (1,))],
    "new version": [("pause_scheduler", ()), ("set_weight_version", ("v",)), ("resume_scheduler", ())],
}


@pytest.mark.parametrize("step", RL_STEPS.values(), ids=RL_STEPS)
def test_the_replay_of_a_training_loop_stays_short_and_correct(step: list[tuple[str, tuple[Any, ...]]]) -> None:
    engine, shared = EngineModel(), SharedState()
    for _ in range(100):
        for method, args in step:
            make_call(engine, shared, method, args)
            assert len(shared.replay()) <= 4
            assert replayed(shared) == engine


@pytest.mark.parametrize("step", RL_STEPS.values(), ids=RL_STEPS)
def test_undo_resumes_and_wakes_an_engine(
    step: list[tuple[str, tuple[Any, ...]]],
) -> None:
    engine, shared = EngineModel(), SharedState()
    for method, args in step:
        make_call(engine, shared, method, args)
        undone = replayed(shared)
        for call in shared.undo():
            undone.apply(*call)
        assert (undone.pause, undone.asleep) == (None, set())


def test_an_open_call_is_replayed_and_after_its_failure_only_later_ones() -> None:
    shared = SharedState()
    settle_lora = shared.record("add_lora", (lora(1),))
    shared.record("add_lora", (lora(2),))(True)
    assert replayed(shared).loras.keys() == {1, 2}
    settle_lora(False)
    assert replayed(shared).loras.keys() == {2}


@pytest.mark.parametrize("known", [True, False])
def test_a_pinned_adapter_that_was_forgotten_or_refused_is_not_replayed(known: bool) -> None:
    shared = SharedState()
    settle_lora = shared.record("add_lora", (lora(1),))
    if known:
        settle_lora(True)
        # Engines keep it.
        shared.record(FORGET_LORA, (1,))(True)
    shared.record("pin_lora", (1,))(True)
    settle_lora(False)
    assert replayed(shared) == EngineModel()


def test_calls_apply_in_the_order_of_recording_not_of_results() -> None:
    shared = SharedState()
    settle_sleep = shared.record("sleep", (1, "abort"))
    shared.record("wake_up", ())(True)
    settle_sleep(True)
    assert replayed(shared) == EngineModel()


def rpc(method: str, **named: Any) -> tuple[Any, ...]:
    return (method, None, (), named)


@pytest.mark.parametrize(
    ("method", "taken", "changed"),
    [
        *((f"{step}_weight_update", True, True) for step in ("start", "start_draft", "finish")),
        *((f"{step}_weights", True, True) for step in ("update", "reset")),
        ("update_weights", False, False),
        ("reload_weights", True, False),
    ],
)
def test_weights_changed_at_run_time_are_those_of_no_fresh_engine(method: str, taken: bool, changed: bool) -> None:
    shared = SharedState()
    shared.record("collective_rpc", rpc(method))(taken)
    assert shared.weights_changed == changed


def test_a_reload_of_the_models_files_undoes_an_update_unless_other_files_were_read_before() -> None:
    shared = SharedState()
    shared.record("collective_rpc", rpc("update_weights"))(True)
    shared.record("collective_rpc", rpc("reload_weights"))(True)
    assert not shared.weights_changed
    shared.record("collective_rpc", rpc("reload_weights", weights_path="/step-2"))(True)
    shared.record("collective_rpc", rpc("reload_weights"))(True)
    assert shared.weights_changed, "the second reload has read /step-2 again"


@pytest.mark.parametrize(
    ("before", "method", "named", "all_fresh", "completes"),
    [
        (["start_weight_update", "update_weights"], "finish_weight_update", {}, False, True),
        (["start_draft_weight_update", "update_weights"], "finish_weight_update", {}, False, False),
        (["start_weight_update", "finish_weight_update"], "finish_weight_update", {}, False, False),
        (["start_weight_update"], "update_weights", {}, False, False),
        ([], "reset_weights", {}, False, False),
        (["update_weights"], "reload_weights", {}, False, True),
        (["reload_weights /other"], "reload_weights", {}, False, False),
        (["reload_weights /other"], "reload_weights", {}, True, True),
        (["reload_weights /other"], "reload_weights", {"weights_path": "/new"}, False, True),
    ],
)
def test_which_calls_give_all_engines_the_same_weights(
    before: list[str], method: str, named: dict[str, Any], all_fresh: bool, completes: bool
) -> None:
    shared = SharedState()
    for call in before:
        name, _, path = call.partition(" ")
        shared.record("collective_rpc", rpc(name, **({"weights_path": path} if path else {})))(True)
    assert shared.completes_weight_update("collective_rpc", rpc(method, **named), all_fresh) == completes
    assert not shared.completes_weight_update("set_weight_version", ("v2",), all_fresh)


@pytest.mark.parametrize(
    ("method", "args"), [("collective_rpc", ("check_health",)), ("profile", (True,)), ("is_sleeping", ())]
)
def test_calls_without_state_are_not_recorded(method: str, args: tuple[Any, ...]) -> None:
    shared = SharedState()
    settle: Callable[[bool], None] = shared.record(method, args)
    settle(True)
    assert shared.replay() == []
    assert not shared.weights_changed


def test_a_snapshot_contains_the_whole_state() -> None:
    shared, other = SharedState(), SharedState()
    shared.record("add_lora", (lora(1),))(True)
    shared.record("collective_rpc", ("update_weights", None, (), {}))(True)
    shared.record("sleep", (1, "abort"))
    other.record("pause_scheduler", ("keep",))
    other.adopt(shared.snapshot(3))
    assert other.snapshot(3) == shared.snapshot(3)
    assert other.weights_changed


@pytest.mark.parametrize("method", [None, "resume_scheduler", "wake_up"])
def test_a_snapshot_says_whether_a_call_has_ended_a_pause_or_there_was_none(method: str | None) -> None:
    shared, other = SharedState(), SharedState()
    if method is not None:
        shared.record("sleep", (1, "abort"))(True)
        shared.record(method, ())(True)
        shared.record("wake_up", ())(True)
    other.adopt(shared.snapshot(3))
    assert (other.replay(), other.sets_pause) == ([], method is not None)
