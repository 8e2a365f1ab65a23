"""Requests that engines may have crashed of: the culprit gets no third replica, and the others lose nothing."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import DEAD_FRAME, REFUSED, FakeRequest
from tests.fakes.fleet import FakeFleet
from tests.orchestrator.local_node import running_node
from vllm_omni_plugin.errors import ReplicaError, RequestLostError
from vllm_omni_plugin.orchestrator.dispatch import dispatcher, suspects
from vllm_omni_plugin.orchestrator.pool.stage_pool import APART
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

LONG = 600.0


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=2, migration_limit=1, replica_wait=LONG) as fleet:
        yield fleet


def die(fleet: FakeFleet, replica_id: int) -> None:
    """An engine dies some time after all that was sent to it."""
    fleet.now += 1.0
    fleet.lose(replica_id)


async def begin(fleet: FakeFleet, request_id: str, replica_id: int) -> None:
    """Submit a request to a replica and deliver the beginning of its answer."""
    await fleet.submit(request_id, affinity=replica_id)
    fleet.say(request_id, 5)


def get_enough_tokens(fleet: FakeFleet, request_id: str) -> None:
    """A suspect has had so many tokens that it need not be kept apart."""
    for token in range(suspects.CLEARING_TOKENS):
        fleet.say(request_id, token)


async def test_suspects_run_apart_in_order(fleet: FakeFleet) -> None:
    for name in "abc":
        await fleet.submit(name, affinity=0)
    die(fleet, 0)
    assert [*map(fleet.home, "abc")] == [1, None, None]
    assert fleet.orchestrator.metrics.moves_waiting == 2
    fleet.join(fleet.pool.member(0))
    assert [*map(fleet.home, "abc")] == [1, 0, None]
    get_enough_tokens(fleet, "a")
    await eventually(lambda: [*map(fleet.home, "abc")] == [1, 0, 1], "the last one's turn")
    assert fleet.orchestrator.metrics.moves_waiting == 0


async def test_a_crash_counts_against_a_request_to_its_end() -> None:
    async with FakeFleet(replicas=4) as fleet:
        await fleet.submit("a", affinity=0)
        die(fleet, 0)
        get_enough_tokens(fleet, "a")
        fleet.orchestrator.replica_lost(fleet.pool.member(fleet.home("a")), "cut off")
        assert "a" in fleet.orchestrator.request_states
        die(fleet, fleet.home("a"))
        assert "it gets no third replica" in str(dict(await fleet.read())["a"])


async def test_suspects_with_some_tokens_go_on_at_once_where_no_other_is_kept_apart() -> None:
    async with FakeFleet(replicas=4) as fleet:
        for name in "abcd":
            await fleet.submit(name, affinity=0)
            fleet.say(name, *range(suspects.CLEARING_TOKENS))
        await fleet.submit("p", affinity=0)
        die(fleet, 0)
        tried = fleet.home("p")
        assert {fleet.home(name) for name in "abcd"} <= {1, 2, 3} - {tried}
        assert fleet.orchestrator.metrics.decisions[0, "LeastQueueLengthBalancer", APART] > 0
        die(fleet, tried)
        assert isinstance(dict(await fleet.read())["p"], RequestLostError)


async def test_suspects_of_another_crash_may_go_where_one_is_no_longer_suspected() -> None:
    async with FakeFleet(replicas=5) as fleet:
        for name in "abc":
            await fleet.submit(name, affinity=0)
        for name in "de":
            await fleet.submit(name, affinity=4)
        die(fleet, 0)
        assert {*map(fleet.home, "abc")} == {1, 2, 3}
        # Now `a` is the culprit, and neither `b` nor `c` has got a token since.
        die(fleet, fleet.home("a"))
        die(fleet, 4)
        assert {*map(fleet.home, "de")} == {*map(fleet.home, "bc")}


async def test_a_replica_that_crashes_twice_gives_no_culprit_while_another_serves() -> None:
    async with FakeFleet(replicas=2) as fleet:
        for name in "ab":
            await fleet.submit(name, affinity=0)
        die(fleet, 0)
        fleet.join(fleet.pool.member(0))
        assert [fleet.home(name) for name in "ab"] == [1, 0]
        die(fleet, 0)
        assert await fleet.read() == []
        get_enough_tokens(fleet, "a")
        await eventually(lambda: fleet.home("b") == 1, "its turn elsewhere")


async def test_a_suspect_avoids_the_replica_that_it_may_have_crashed() -> None:
    async with FakeFleet(replicas=3) as fleet:
        for name in "abc":
            await fleet.submit(name, affinity=0)
        die(fleet, 0)
        await fleet.abort("a")
        fleet.join(fleet.pool.member(0))
        assert [*map(fleet.home, "bc")] == [2, 1]
        await fleet.abort("c")
        fleet.orchestrator.replica_lost(fleet.pool.member(2), "cut off")
        assert fleet.home("b") == 1, "although replica 0 serves, and its key means that"


async def test_with_one_replica_suspects_run_apart_only_after_the_second_crash() -> None:
    async with FakeFleet(replicas=1, replica_wait=LONG) as fleet:
        # No request goes to it.
        fleet.pool.add().other_generation = "dtype: head has a, replica b"
        for name in "abc":
            await fleet.submit(name)
        for homes in ([0, 0, 0], [0, None, None]):
            die(fleet, 0)
            fleet.join(fleet.pool.member(0))
            assert [*map(fleet.home, "abc")] == homes
        die(fleet, 0)
        assert [name for name, error in await fleet.read() if isinstance(error, RequestLostError)] == ["a"]


async def test_a_request_that_could_not_be_sent_is_not_suspected(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = fleet.pool.member(0).client
    assert client is not None

    def send(frames: object) -> None:
        # The link finds that the engine is not there any more, and its process says how it crashed.
        client.mark_dead("its engine process exited: it was ended by SIGSEGV", engine_failed=True)
        raise ReplicaError("not connected")

    await fleet.submit("sent", affinity=0)
    monkeypatch.setattr(fleet.links[0], "send", send)
    await fleet.submit("not sent", affinity=0)
    suspected = {name: len(state.runs[0].crash_losses) for name, state in fleet.orchestrator.request_states.items()}
    assert suspected == {"sent": 1, "not sent": 0}


@pytest.mark.parametrize("how", ["cut off", "it was removed", "a rank of a lockstep group"])
async def test_a_loss_that_no_request_can_have_caused_makes_no_suspects(fleet: FakeFleet, how: str) -> None:
    fleet.pool.lockstep = "lockstep" in how
    for name in "abc":
        await fleet.submit(name, affinity=0)
    if "group" in how:
        die(fleet, 0)
    else:
        fleet.orchestrator.replica_lost(fleet.pool.member(0), how)
    assert [*map(fleet.home, "abc")] == [1, 1, 1]


async def test_a_request_that_makes_engines_send_unusable_messages_gets_no_third_replica() -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("p")
        for _ in range(2):
            fleet.now += 1.0
            fleet.attempt("p")[0].say(b"garbage")
        [(_, error)] = await fleet.read()
        assert str(error).count("it sent an invalid message") == 2
        assert "it gets no third replica" in str(error)
        assert len(fleet.pool.serving) == 1


async def test_suspects_wait_for_a_while_only_and_several_candidates_give_no_culprit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_APART_WAIT_S", 0.02)
    async with FakeFleet(replicas=3, replica_wait=LONG) as fleet:
        fleet.orchestrator.replica_lost(fleet.pool.member(2), "cut off")
        for name in "abc":
            await fleet.submit(name, affinity=0)
        die(fleet, 0)
        assert [*map(fleet.home, "abc")] == [1, None, None]
        fleet.now += 1.0
        await eventually(lambda: [*map(fleet.home, "abc")] == [1, 1, 1], "the end of the waiting")
        assert fleet.orchestrator.metrics.moves_waiting == 0
        for replica_id in (0, 2):
            fleet.join(fleet.pool.member(replica_id))
        await fleet.submit("new", affinity=1)
        die(fleet, 1)
        assert await fleet.read() == []
        # They get no third replica, and are tried apart where one crashed under them.
        await eventually(lambda: fleet.home("new") == 2, "the turn of who may go everywhere")
        assert [*map(fleet.home, "abc")] == [0, None, None]
        die(fleet, fleet.home("a"))
        [(request_id, error)] = await fleet.read()
        assert (request_id, isinstance(error, RequestLostError)) == ("a", True)
        assert "it gets no third replica" in str(error)
        # Not even now that another one is found guilty, but they need not be tried any more.
        await eventually(lambda: fleet.orchestrator.metrics.held == 2, "the wait for one of the two")
        fleet.join(fleet.pool.member(1))
        assert [*map(fleet.home, "bc")] == [1, 1]


async def test_a_suspect_that_a_paused_engine_refuses_does_not_go_back_to_where_an_engine_died_under_it() -> None:
    async with FakeFleet(replicas=3) as fleet:
        await fleet.submit("s")
        first = fleet.home("s")
        die(fleet, first)
        fleet.join(fleet.pool.member(first))
        second = fleet.home("s")
        third = 3 - first - second
        await begin(fleet, "another", third)
        fleet.say("s", finish_reason=REFUSED)
        await eventually(lambda: fleet.home("s") not in (None, second))
        assert fleet.home("s") == third


async def test_no_third_engine_is_tried_while_replicas_return_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_APART_WAIT_S", 0.1)
    async with FakeFleet(replicas=3, replica_wait=LONG, size=EngineSize(sequences=1)) as fleet:
        for replica_id in (1, 2):
            fleet.orchestrator.replica_lost(fleet.pool.member(replica_id), "cut off")
        for name in "ab":
            await fleet.submit(name)
        die(fleet, 0)
        fleet.join(fleet.pool.member(1))
        fleet.now += 2.0
        for name in "ab":
            await eventually(lambda name=name: fleet.home(name) == 1, "its turn")  # type: ignore[misc]
            get_enough_tokens(fleet, name)
        die(fleet, 1)
        # Replica 2 can start a request, and 0 has its only one: both may go to 0 only.
        fleet.join(fleet.pool.member(2))
        fleet.join(fleet.pool.member(0))
        fleet.now += 0.5
        await eventually(lambda: None not in map(fleet.home, "ab"), "the end of the waiting")
        assert [*map(fleet.home, "ab")] == [0, 0]


@pytest.mark.parametrize(
    ("ended", "suspects"),
    [
        ("it was ended by SIGSEGV", 2),
        ("it exited with code 1", 2),
        ("its worker VllmWorker-0 was ended by SIGILL", 2),
        ("it was ended by SIGKILL", 0),
        ("its worker VllmWorker-0 was ended by SIGKILL", 0),
        ("it was ended by SIGTERM", 0),
        ("it was ended by SIGINT", 0),
        pytest.param("it exited with code 0", 0, id="vLLM's way to end at SIGTERM"),
    ],
)
@pytest.mark.parametrize("reports", [True, False])
async def test_only_an_engine_that_crashed_by_itself_makes_what_it_had_suspect(
    ended: str, suspects: int, reports: bool
) -> None:
    async with running_node() as node:
        await node.replicas.start()
        for name in "ab":
            node.submit(FakeRequest(name, affinity=0))
        await eventually(lambda: len(node.orchestrator.request_states) == 2)
        engine = node.engine_of(0)
        engine.process.exit_note = ended
        if reports:
            engine.say(DEAD_FRAME)
        else:
            engine.process.die()
        runs = [state.runs[0] for state in node.orchestrator.request_states.values()]
        await eventually(lambda: all(run.losses for run in runs), "the loss")
        assert sum(len(run.crash_losses) for run in runs) == suspects
