"""Sessions whose chunks are kept: wherever the replica is lost, the next one is told all, and nobody hears it twice."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator.requests.stage_run import Fail, Loss, Redispatch, StageRun, StreamingInputState
from vllm_omni_plugin.vllm_api.requests.move import Move

CHUNK = FakeRequest("r", resumable=True)
LAST = FakeRequest("r")


def session() -> StageRun:
    """A session on replica 1 whose first chunk has been sent."""
    run = StageRun(CHUNK.request_id, CHUNK, 0.0, streaming=StreamingInputState(replayable=True))
    dispatch(run, 1, "r-1")
    return run


def dispatch(run: StageRun, replica_id: int, engine_request_id: str) -> None:
    """Bind the next attempt of a session to a replica."""
    run.dispatch(replica_id, engine_request_id, {}, Decision(0, "test"), 0.0)


def add(run: StageRun, *chunks: FakeRequest) -> None:
    """Further chunks come and are sent."""
    assert run.streaming is not None
    for chunk in chunks:
        run.add_chunk(chunk)
        if run.replica_id is None:
            run.streaming.unsent.append(chunk)
        else:
            run.streaming.note_sent(chunk)


def lose(run: StageRun, replica_id: int = 2) -> list[FakeRequest]:
    """The replica is lost, another one takes over. Returns what it is sent after the first chunk."""
    assert run.streaming is not None
    assert isinstance(run.lose_replica(Loss(1, "died"), 99, Move.NEVER), Redispatch)
    dispatch(run, replica_id, f"r-{replica_id}")
    return run.streaming.take_unsent()


def hear(run: StageRun, tokens: Sequence[int], finished: bool) -> list[int]:
    """An output comes, as a dispatcher takes it. Returns what of it is new."""
    new = list(tokens)
    if run.joining:
        new = new[run.join(tokens, finished) :]
        if run.finished or run.joining:
            return []
    run.deliver(new, finished)
    return new


def test_a_session_of_which_nothing_was_heard_starts_again_with_all_its_chunks() -> None:
    run = session()
    add(run, CHUNK, LAST)
    assert lose(run) == [CHUNK, LAST]
    assert not run.joining
    assert run.streaming is not None
    assert run.streaming.open_turns == 2


def test_chunks_that_came_while_nobody_served_follow_those_that_were_sent() -> None:
    run = session()
    assert run.streaming is not None
    add(run, CHUNK)
    run.lose_replica(Loss(1, "died"), 99, Move.NEVER)
    late = FakeRequest("r", resumable=True, prompt=[7])
    add(run, late, LAST)
    dispatch(run, 2, "r-2")
    assert run.streaming.take_unsent() == [CHUNK, late, LAST]
    assert run.streaming.open_turns == 3


def test_what_was_sent_comes_again_before_what_waits() -> None:
    waits = FakeRequest("r", resumable=True, prompt=[7])
    state = StreamingInputState(replayable=True, unsent=[waits], sent=[CHUNK])
    state.rewind()
    assert (state.unsent, state.sent, state.open_turns) == ([CHUNK, waits], [], 3)


def test_turns_that_were_heard_whole_are_swallowed_with_their_ends() -> None:
    run = session()
    add(run, CHUNK, LAST)
    hear(run, [1, 2], finished=True)
    lose(run)
    assert hear(run, [1], finished=False) == []
    assert hear(run, [2], finished=True) == []
    assert hear(run, [3], finished=False) == [3]
    assert hear(run, [4], finished=True) == [4]
    assert run.finished
    assert run.produced.tolist() == [1, 2, 3, 4]


def test_an_output_that_is_partly_known_gives_the_rest() -> None:
    run = session()
    add(run, LAST)
    hear(run, [1, 2], finished=False)
    lose(run)
    assert hear(run, [1, 2, 3], finished=True) == [3]
    assert run.finished


def test_a_session_of_which_all_was_heard_before_its_input_closed_ends_with_the_last_known_token() -> None:
    run = session()
    hear(run, [1, 2], finished=True)
    lose(run)
    add(run, LAST)
    assert hear(run, [1], finished=False) == []
    assert hear(run, [2], finished=True) == []
    assert run.finished


def test_a_session_that_waits_for_its_next_chunk_when_the_replay_is_over_goes_on() -> None:
    run = session()
    hear(run, [1], finished=True)
    lose(run)
    assert hear(run, [1], finished=True) == []
    add(run, CHUNK, LAST)
    assert hear(run, [2], finished=True) == [2]
    assert run.finished


@pytest.mark.parametrize("other", [[9], [1, 9], [1, 2, 9]], ids=str)
def test_a_replay_that_differs_ends_the_session(other: list[int]) -> None:
    run = session()
    add(run, CHUNK)
    hear(run, [1, 2], finished=True)
    hear(run, [3], finished=False)
    lose(run)
    with pytest.raises(RequestLostError, match="did not repeat"):
        hear(run, other, finished=False)
    assert run.finished


def test_a_session_moves_as_often_as_the_limit() -> None:
    run = session()
    assert isinstance(run.lose_replica(Loss(1, "died"), 0, Move.NEVER), Fail)
    assert run.finished


@given(data=st.data(), turns=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_wherever_replicas_are_lost_each_token_is_heard_once(data: st.DataObject, turns: list[int]) -> None:
    numbers = iter(range(100))
    answers = [[next(numbers) for _ in range(length)] for length in turns]
    run, heard, replica_id = session(), list[int](), 1
    to_come = [*[CHUNK] * (len(turns) - 1), LAST]
    turn, said = 0, 0
    for _ in range(400):
        if run.finished:
            break
        assert run.streaming is not None
        open_turns = 1 + sum(chunk.resumable for chunk in run.streaming.sent)
        does = ["lose"] * (replica_id < 8) + ["chunk"] * bool(to_come) + ["say"] * (3 * (turn < open_turns))
        action = data.draw(st.sampled_from(does or ["stuck"]))
        assert action != "stuck"
        if action == "lose":
            replica_id += 1
            lose(run, replica_id)
            turn, said = 0, 0
        elif action == "chunk":
            add(run, to_come.pop(0))
        else:
            count = data.draw(st.integers(1, len(answers[turn]) - said))
            new, said = answers[turn][said : said + count], said + count
            finished = said == len(answers[turn])
            heard += hear(run, new, finished)
            if finished:
                turn, said = turn + 1, 0
    assert run.finished
    assert heard == run.produced.tolist() == [token for answer in answers for token in answer]
