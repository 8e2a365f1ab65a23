"""The life of one request in one stage."""

from collections.abc import Callable

import pytest

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError
from vllm_omni_plugin.orchestrator.requests.stage_run import (
    Fail,
    Loss,
    Redispatch,
    RequestPhase,
    StageRun,
    StreamingInputState,
)
from vllm_omni_plugin.vllm_api.requests.move import Move

NO_REPLICA = NoReplicaError("none")
CHUNK = FakeRequest("r", resumable=True)
LAST = FakeRequest("r", resumable=False)


def dispatch(state: StageRun, replica_id: int, engine_request_id: str) -> None:
    """Bind the next attempt of a request to a replica."""
    state.dispatch(replica_id, engine_request_id, {}, Decision(0, "test"), 0.0)


def state_in(phase: RequestPhase, streaming: bool = False) -> StageRun:
    """Return a request that has come to a phase by the usual way."""
    state = StageRun("r", FakeRequest("r"), 0.0, streaming=StreamingInputState() if streaming else None)
    if phase is not RequestPhase.QUEUED:
        dispatch(state, 1, "r-1")
    if phase is RequestPhase.STREAMING:
        state.deliver([5, 6], finished=False)
    if phase is RequestPhase.MOVING:
        state.lose_replica(Loss(1, "died"), 3, Move.RESUME)
    if phase is RequestPhase.FINISHED:
        state.abort()
    return state


def test_a_request_goes_from_queued_over_dispatched_and_streaming_to_finished() -> None:
    state = state_in(RequestPhase.QUEUED)
    assert (state.request_id, state.replica_id, state.engine_request_id, state.attempts) == ("r", None, "", 0)
    dispatch(state, 1, "r-1")
    assert (state.phase, state.replica_id, state.engine_request_id) == (RequestPhase.DISPATCHED, 1, "r-1")
    assert state.attempts == 1
    state.deliver([1], finished=False)
    assert state.phase is RequestPhase.STREAMING
    state.deliver([1], finished=False)
    assert not state.finished
    state.deliver([1], finished=True)
    assert state.finished


def test_a_request_may_finish_with_its_first_output() -> None:
    state = state_in(RequestPhase.DISPATCHED)
    state.deliver([1], finished=True)
    assert state.finished


@pytest.mark.parametrize("phase", RequestPhase)
def test_a_request_may_be_aborted_in_any_phase(phase: RequestPhase) -> None:
    state = state_in(phase)
    state.abort()
    assert state.finished


def test_a_refused_request_is_finished_with_that_error() -> None:
    state = state_in(RequestPhase.QUEUED)
    assert state.give_up(NO_REPLICA) == Fail(NO_REPLICA)
    assert state.finished


WAITING = {RequestPhase.QUEUED, RequestPhase.MOVING}
ILLEGAL: list[tuple[str, Callable[[StageRun], object], set[RequestPhase]]] = [
    ("dispatch", lambda s: dispatch(s, 2, "r-2"), set(RequestPhase) - WAITING),
    ("give up", lambda s: s.give_up(NO_REPLICA), set(RequestPhase) - WAITING),
    ("join", lambda s: s.join([1], finished=False), set(RequestPhase) - {RequestPhase.DISPATCHED}),
    ("deliver", lambda s: s.deliver([1], finished=False), WAITING | {RequestPhase.FINISHED}),
    ("finish", lambda s: s.deliver([1], finished=True), WAITING | {RequestPhase.FINISHED}),
    ("lose", lambda s: s.lose_replica(Loss(1, "died"), 3, Move.RESUME), WAITING | {RequestPhase.FINISHED}),
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
    transition: Callable[[StageRun], object], phase: RequestPhase
) -> None:
    state = state_in(phase)
    with pytest.raises(AssertionError, match=f"request r is {phase.value}"):
        transition(state)
    assert state.phase is phase


@pytest.mark.parametrize("move", Move)
def test_a_request_of_which_nothing_was_delivered_starts_again_whatever_it_is(move: Move) -> None:
    state = state_in(RequestPhase.DISPATCHED)
    assert state.lose_replica(Loss(1, "died"), 3, move) == Redispatch(Move.RESTART)
    assert (state.phase, state.replica_id, state.engine_request_id) == (RequestPhase.MOVING, None, "")
    assert not state.joining


@pytest.mark.parametrize("move", [Move.RESUME, Move.REPLAY])
def test_a_request_of_which_part_was_delivered_goes_on_in_its_own_way(move: Move) -> None:
    state = state_in(RequestPhase.STREAMING)
    assert state.lose_replica(Loss(1, "died"), 3, move) == Redispatch(move)
    assert (state.phase, state.move, state.joining) == (RequestPhase.MOVING, move, True)
    assert state.produced.tolist() == [5, 6]


def test_a_request_that_never_moves_fails_once_part_of_it_was_delivered() -> None:
    state = state_in(RequestPhase.STREAMING)
    action = state.lose_replica(Loss(1, "died"), 3, Move.NEVER)
    assert isinstance(action, Fail)
    assert isinstance(action.error, RequestLostError)
    assert "Replica 1 was lost" in str(action.error)
    assert "(died)" in str(action.error)
    assert "part of the answer had been delivered" in str(action.error)
    assert state.finished


def test_a_request_that_finds_no_other_replica_says_what_became_of_its_own() -> None:
    state = state_in(RequestPhase.MOVING)
    dispatch(state, 2, "r-2")
    state.deliver([5], finished=False)
    state.lose_replica(Loss(2, "died too"), 3, Move.RESUME)
    action = state.give_up(NO_REPLICA)
    assert isinstance(action.error, RequestLostError)
    assert "Replica 2 was lost" in str(action.error)
    assert str(action.error).endswith("none")


def replaying(*produced: int) -> StageRun:
    """Return a request that replays on replica 2 what replica 1 had produced."""
    state = state_in(RequestPhase.DISPATCHED)
    state.deliver(list(produced), finished=False)
    state.lose_replica(Loss(1, "died"), 3, Move.REPLAY)
    dispatch(state, 2, "r-2")
    return state


def test_a_resumed_request_joins_with_its_first_token() -> None:
    state = state_in(RequestPhase.STREAMING)
    state.lose_replica(Loss(1, "died"), 3, Move.RESUME)
    dispatch(state, 2, "r-2")
    assert state.join([7], finished=False) == 0
    assert not state.joining
    state.deliver([7], finished=False)
    assert state.produced.tolist() == [5, 6, 7]


def test_a_replay_is_swallowed_until_it_joins_in_the_middle_of_an_output() -> None:
    state = replaying(1, 2, 3, 4, 5)
    assert (state.join([1, 2], finished=False), state.joining) == (2, True)
    assert (state.join([3], finished=False), state.joining) == (1, True)
    assert (state.join([4, 5, 6, 7], finished=False), state.joining) == (2, False)


def test_a_replay_that_repeats_all_in_whole_outputs_joins_with_the_next() -> None:
    state = replaying(1, 2)
    assert (state.join([1, 2], finished=False), state.joining) == (2, True)
    assert (state.join([3], finished=False), state.joining) == (0, False)


def test_a_replay_may_end_right_where_the_delivered_part_did() -> None:
    state = replaying(1, 2)
    assert (state.join([1, 2], finished=True), state.joining) == (2, False)


@pytest.mark.parametrize(
    ("outputs", "finished"),
    [([[9]], False), ([[1, 9]], False), ([[1], [2], [9]], False), ([[1, 2, 9, 4]], False), ([[1, 2]], True)],
    ids=str,
)
def test_a_replay_that_differs_is_one_clear_error(outputs: list[list[int]], finished: bool) -> None:
    state = replaying(1, 2, 3)
    for output in outputs[:-1]:
        state.join(output, finished=False)
    with pytest.raises(RequestLostError, match=r"Replica 1 was lost.*did not repeat.*send it again"):
        state.join(outputs[-1], finished)
    assert state.finished


def test_a_replay_whose_replica_is_lost_begins_again_from_the_start() -> None:
    state = replaying(1, 2, 3)
    state.join([1, 2], finished=False)
    assert state.lose_replica(Loss(1, "died too"), 3, Move.REPLAY) == Redispatch(Move.REPLAY)
    dispatch(state, 3, "r-3")
    assert (state.join([1, 2, 3, 4], finished=False), state.joining) == (3, False)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_request_moves_as_often_as_the_limit_and_then_fails(limit: int) -> None:
    state = state_in(RequestPhase.QUEUED)
    for attempt in range(limit):
        dispatch(state, attempt, f"r-{attempt}")
        assert state.lose_replica(Loss(1, "died"), limit, Move.RESUME) == Redispatch(Move.RESTART)
    dispatch(state, limit, f"r-{limit}")
    action = state.lose_replica(Loss(1, "died"), limit, Move.RESUME)
    assert isinstance(action, Fail)
    assert f"moved {limit} times, the limit of --omni-migration-limit" in str(action.error)


def test_a_session_goes_on_between_turns_and_ends_after_the_last_once_its_input_is_closed() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.deliver([1], finished=True)
    assert state.phase is RequestPhase.STREAMING
    state.add_chunk(CHUNK)
    state.add_chunk(LAST)
    state.deliver([1], finished=False)
    assert not state.finished
    state.deliver([1], finished=True)
    assert state.finished


def test_a_session_whose_input_closes_after_its_last_turn_ends_at_once() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.deliver([1], finished=True)
    state.add_chunk(LAST)
    assert state.finished


def test_a_session_with_several_open_turns_waits_for_all() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.add_chunk(CHUNK)
    state.add_chunk(CHUNK)
    state.add_chunk(LAST)
    for _ in range(2):
        state.deliver([1], finished=True)
        assert not state.finished
    state.deliver([1], finished=True)
    assert state.finished


def test_a_session_that_is_cut_short_ends_with_turns_open() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    state.add_chunk(CHUNK)
    state.deliver([1], finished=True, cut_short=True)
    assert state.finished


def test_a_session_does_not_move() -> None:
    state = state_in(RequestPhase.DISPATCHED, streaming=True)
    action = state.lose_replica(Loss(1, "died"), 3, Move.RESUME)
    assert isinstance(action, Fail)
    assert "a streaming-input session cannot move" in str(action.error)
