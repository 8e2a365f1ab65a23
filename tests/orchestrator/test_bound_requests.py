"""Requests bound to a replica by what an earlier one has left there, and sessions that are replayed when it is lost."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator import PoolMember, StageRun, StreamingInputState
from vllm_omni_plugin.orchestrator.pool import affinity_bindings
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move

KEY = 4


async def send_first(fleet: FakeFleet, key: int = KEY) -> Any:
    """The first request of a key begins; returns the id of its replica."""
    await fleet.submit(f"first of {key}", affinity=key)
    return fleet.home(f"first of {key}")


async def end_first(fleet: FakeFleet, key: int = KEY) -> None:
    fleet.say(f"first of {key}", finish_reason="stop")
    await fleet.read()


async def send_next(fleet: FakeFleet) -> None:
    """One that needs what the first one has left."""
    await fleet.submit("next", affinity=KEY, move="pinned")


async def is_lost(fleet: FakeFleet) -> bool:
    """Whether the request has ended with an error that says what to do, and is charged to nobody."""
    error = await fleet.the_error("next")
    assert isinstance(error, RequestLostError)
    return "Please send both again" in str(error) and sum(fleet.in_flight) == 0


async def test_it_ends_with_its_replica_and_is_sent_to_no_other(fleet: FakeFleet) -> None:
    replica_id = await send_first(fleet)
    await end_first(fleet)
    await send_next(fleet)
    assert fleet.home("next") == replica_id
    fleet.lose(replica_id)
    assert await is_lost(fleet)
    assert fleet.links[1 - replica_id].added == []
    assert fleet.orchestrator.metrics.requests_failed["replica_lost"] == 1


@pytest.mark.parametrize("back", [False, True])
async def test_it_ends_when_its_replica_was_lost_in_between_and_may_have_come_back(
    fleet: FakeFleet, back: bool
) -> None:
    replica_id = await send_first(fleet)
    await end_first(fleet)
    fleet.lose(replica_id)
    if back:
        fleet.join(fleet.pool.member(replica_id))
    added = [len(link.added) for link in fleet.links.values()]
    await send_next(fleet)
    assert await is_lost(fleet)
    assert [len(link.added) for link in fleet.links.values()] == added


@pytest.mark.parametrize("others_serve", [True, False])
async def test_it_follows_to_a_replica_that_gets_nothing_else_any_more(fleet: FakeFleet, others_serve: bool) -> None:
    replica_id = await send_first(fleet)
    await end_first(fleet)
    for cordoned in [replica_id] if others_serve else fleet.links:
        fleet.pool.cordon(fleet.pool.member(cordoned), "admin")
    await send_next(fleet)
    assert fleet.home("next") == replica_id


async def test_it_follows_to_where_the_first_one_has_moved(fleet: FakeFleet) -> None:
    replica_id = await send_first(fleet)
    fleet.lose(replica_id)
    fleet.join(fleet.pool.member(replica_id))
    moved_to = fleet.home(f"first of {KEY}")
    await end_first(fleet)
    fleet.join(fleet.pool.add())
    await send_next(fleet)
    assert fleet.home("next") == moved_to


async def test_the_latest_keys_are_remembered(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity_bindings, "MAX_BINDINGS", 2)
    await send_first(fleet, KEY + 1)
    await end_first(fleet, KEY + 1)
    replica_id = await send_first(fleet)
    await end_first(fleet)
    fleet.join(fleet.pool.add())
    await send_next(fleet)
    assert fleet.home("next") == replica_id
    fleet.say("next", finish_reason="stop")
    await fleet.read()
    for key in (KEY + 1, KEY + 2):
        await send_first(fleet, key)
        await end_first(fleet, key)
    fleet.lose(replica_id)
    # As if it were the first one, but not twice.
    await send_next(fleet)
    assert fleet.home("next") != replica_id
    fleet.lose(fleet.home("next"))
    assert await is_lost(fleet)


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
