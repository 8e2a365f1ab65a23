"""The life of one request."""

from collections.abc import Callable

import pytest

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError
from vllm_omni_plugin.orchestrator.request_state import (
    Fail,
    OrchestratorRequestState,
    Redispatch,
    RequestPhase,
    StreamingInputState,
)

NO_REPLICA = NoReplicaError("none")


def state_in(phase: RequestPhase, streaming: bool = False) -> OrchestratorRequestState:
    """Return a request that has come to a phase by the usual way."""
    state = OrchestratorRequestState(FakeRequest("r"), 0.0, streaming=StreamingInputState() if streaming else None)
    if phase is not RequestPhase.QUEUED:
        state.dispatch(1, "r-1")
    if phase is RequestPhase.STREAMING:
        state.deliver(finished=False)
    if phase is RequestPhase.FINISHED:
        state.abort()
    return state


def test_a_request_goes_from_queued_over_dispatched_and_streaming_to_finished() -> None:
    state = state_in(RequestPhase.QUEUED)
    assert (state.request_id, state.replica_id, state.engine_request_id, state.attempts) == ("r", None, "", 0)
    state.dispatch(1, "r-1")
    assert (state.phase, state.replica_id, state.engine_request_id) == (RequestPhase.DISPATCHED, 1, "r-1")
    assert state.attempts == 1
    state.deliver(finished=False)
    assert state.phase is RequestPhase.STREAMING
    state.deliver(finished=False)
    assert not state.finished
    state.deliver(finished=True)
    assert state.finished


def test_a_request_may_finish_with_its_first_output() -> None:
    state = state_in(RequestPhase.DISPATCHED)
    state.deliver(finished=True)
    assert state.finished


@pytest.mark.parametrize("phase", RequestPhase)
def test_a_request_may_be_aborted_in_any_phase(phase: RequestPhase) -> None:
    state = state_in(phase)
    state.abort()
    assert state.finished


def test_a_refused_request_is_finished_with_that_error() -> None:
    state = state_in(RequestPhase.QUEUED)
    assert state.refuse(NO_REPLICA) == Fail(NO_REPLICA)
    assert state.finished


ILLEGAL: list[tuple[str, Callable[[OrchestratorRequestState], object], set[RequestPhase]]] = [
    ("dispatch", lambda s: s.dispatch(2, "r-2"), set(RequestPhase) - {RequestPhase.QUEUED}),
    ("refuse", lambda s: s.refuse(NO_REPLICA), set(RequestPhase) - {RequestPhase.QUEUED}),
    ("deliver", lambda s: s.deliver(finished=False), {RequestPhase.QUEUED, RequestPhase.FINISHED}),
    ("finish", lambda s: s.deliver(finished=True), {RequestPhase.QUEUED, RequestPhase.FINISHED}),
    ("lose", lambda s: s.lose_replica("died", 3), {RequestPhase.QUEUED, RequestPhase.FINISHED}),
]


@pytest.mark.parametrize(
    ("transition", "phase"),
    [
        pytest.param(transition, phase, id=f"{name} when {phase.value}")
        for name, transition, phases in ILLEGAL
        for phase in sorted(phases, key=str)
    ],
)
def test_an_illegal_transition_raises_and_changes_nothing(
    transition: Callable[[OrchestratorRequestState], object], phase: RequestPhase
) -> None:
    state = state_in(phase)
    with pytest.raises(AssertionError, match=f"request r is {phase.value}"):
        transition(state)
    assert state.phase is phase


def test_a_request_of_which_nothing_was_delivered_is_queued_again() -> None:
    state = state_in(RequestPhase.DISPATCHED)
    assert state.lose_replica("died", 3) == Redispatch()
    assert (state.phase, state.replica_id, state.engine_request_id) == (RequestPhase.QUEUED, None, "")


def test_a_request_of_which_part_was_delivered_fails() -> None:
    state = state_in(RequestPhase.STREAMING)
    action = state.lose_replica("died", 3)
    assert isinstance(action, Fail)
    assert isinstance(action.error, RequestLostError)
    assert "Replica 1 was lost" in str(action.error)
    assert "(died)" in str(action.error)
    assert "part of the answer had been delivered" in str(action.error)
    assert state.finished


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_request_moves_as_often_as_the_limit_and_then_fails(limit: int) -> None:
    state = state_in(RequestPhase.QUEUED)
    for attempt in range(limit):
        state.dispatch(attempt, f"r-{attempt}")
        assert state.lose_replica("died", limit) == Redispatch()
    state.dispatch(limit, f"r-{limit}")
    action = state.lose_replica("died", limit)
    assert isinstance(action, Fail)
    assert f"moved {limit} times, the limit of --omni-migration-limit" in str(action.error)


def test_a_session_goes_on_between_turns_and_ends_after_the_last_once_its_input_is_closed() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.deliver(finished=True)
    assert state.phase is RequestPhase.STREAMING
    state.add_chunk(resumable=True)
    state.add_chunk(resumable=False)
    state.deliver(finished=False)
    assert not state.finished
    state.deliver(finished=True)
    assert state.finished


def test_a_session_whose_input_closes_after_its_last_turn_ends_at_once() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.deliver(finished=True)
    state.add_chunk(resumable=False)
    assert state.finished


def test_a_session_with_several_open_turns_waits_for_all() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.add_chunk(resumable=True)
    state.add_chunk(resumable=True)
    state.add_chunk(resumable=False)
    for _ in range(2):
        state.deliver(finished=True)
        assert not state.finished
    state.deliver(finished=True)
    assert state.finished


def test_a_session_that_is_cut_short_ends_with_turns_open() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.add_chunk(resumable=True)
    state.deliver(finished=True, cut_short=True)
    assert state.finished


def test_a_session_does_not_move() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    action = state.lose_replica("died", 3)
    assert isinstance(action, Fail)
    assert "a streaming-input session cannot move" in str(action.error)
