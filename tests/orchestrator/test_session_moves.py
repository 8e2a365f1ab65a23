"""Replayable sessions: wherever the replica is lost, the next one gets all chunks, and each token is delivered once."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.orchestrator import PoolMember, StageRun, StreamingInputState
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move

CHUNK = FakeRequest("r", resumable=True)
LAST = FakeRequest("r")


def session() -> StageRun:
    """A session on replica 1 whose first chunk has been sent."""
    run = StageRun(CHUNK.request_id, CHUNK, 0.0, streaming=StreamingInputState(replayable=True))
    assign(run, 1, "r-1")
    return run


def assign(run: StageRun, replica_id: int, engine_request_id: str) -> None:
    run.assign(replica_id, engine_request_id, {}, Decision(0, "test"), 0.0)


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
    assert run.lose_replica(Loss(PoolMember(1, 0), "died"), 99, Move.NEVER) is None
    assign(run, replica_id, f"r-{replica_id}")
    return run.streaming.take_unsent()


def hear(run: StageRun, tokens: Sequence[int], finished: bool) -> list[int]:
    """An output comes, as a dispatcher takes it. Returns what of it is new."""
    new = list(tokens)
    if run.skipping_delivered:
        new = new[run.skip_delivered(tokens, finished) :]
        if run.finished or run.skipping_delivered:
            return []
    run.deliver(new, finished)
    return new


@given(data=st.data(), turns=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_each_token_is_delivered_once_wherever_replicas_are_lost(data: st.DataObject, turns: list[int]) -> None:
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
