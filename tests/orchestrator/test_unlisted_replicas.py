"""A lease outranks the replica list: what heads do about rows that are missing, late or newer."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.orchestrator.remote_fleet import Fleet
from tests.orchestrator.test_replica_list import row
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.event_log import EventKind
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaLeft


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet() as fleet:
        yield fleet


async def test_a_replica_serves_while_its_lease_lasts_though_a_new_coordinator_does_not_list_it(fleet: Fleet) -> None:
    first, second = await fleet.joined(row(1, replica_id=4), row(2, replica_id=7))
    await fleet.submit("a")
    for replica in (first, second):
        fleet.register(replica.info, accepts=False)
        fleet.unregister(replica.info)
        fleet.unregister(replica.info)
    await fleet.all_handled()
    await fleet.submit("b")
    assert [len(replica.link.added) for replica in (first, second)] == [1, 1]
    for replica in (first, second):
        fleet.register(replica.info)
        replica.link.output(replica.link.added[0], 5, finish_reason="stop")
    await fleet.all_handled()
    assert {("a", "stop"), ("b", "stop")} <= set(await fleet.read())
    assert [member.replica_id for member in fleet.pool.members] == [4, 7]
    assert fleet.attachments == [first, second]
    assert not first.closed


@pytest.mark.parametrize("listed_again", [False, True])
async def test_an_unlisted_replica_is_forgotten_when_its_lease_ends_unless_it_is_listed_again(
    fleet: Fleet, listed_again: bool
) -> None:
    first, second = await fleet.joined(row(1), row(2))
    await fleet.submit("a")
    gone, other = (first, second) if first.link.added else (second, first)
    fleet.unregister(gone.info)
    if listed_again:
        fleet.register(gone.info)
    await fleet.all_handled()
    assert not other.link.added
    gone.client.mark_dead("its engine crashed", engine_failed=True)
    await eventually(lambda: other.link.added and gone.closed)
    await fleet.serving(1 + listed_again)
    assert len(fleet.attachments) == 2 + listed_again
    await fleet.read()
    assert isinstance(fleet.changes[-1], ReplicaLeft) is not listed_again
    events = [(event.kind, event.reason) for event in fleet.orchestrator.events.after()]
    assert (EventKind.LOST, "its engine crashed") in events


async def test_an_unlisted_replica_whose_lease_has_ended_already_is_gone(fleet: Fleet) -> None:
    (replica,) = await fleet.joined(row(1))
    fleet.pause_over.clear()
    replica.link.say_dead()
    await eventually(lambda: fleet.pauses)
    fleet.unregister(replica.info)
    await eventually(lambda: not fleet.pool.members)
    assert fleet.attachments == [replica]


async def test_an_unlisted_replica_that_drains_is_forgotten_when_it_has_drained(fleet: Fleet) -> None:
    (replica,) = await fleet.joined(row(1))
    fleet.unregister(replica.info)
    await fleet.all_handled()
    replica.on_status(ReplicaStatus.DRAINING)
    await eventually(lambda: replica.closed)
    assert fleet.pool.members == ()
    await fleet.joined(row(1, incarnation=2))


async def test_an_unlisted_replica_that_is_taken_out_or_removed_is_forgotten_once(fleet: Fleet) -> None:
    first, second = await fleet.joined(row(1), row(2))
    for replica in (first, second):
        fleet.unregister(replica.info)
    await fleet.all_handled()
    fleet.orchestrator.distrust(fleet.pool.member(0), "its outputs are wrong")
    fleet.remote.leave(fleet.pool.member(1))
    assert fleet.pool.members == ()
    await eventually(lambda: first.closed and second.closed)
    await fleet.read()
    assert [type(change) for change in fleet.changes[2:]] == [ReplicaLeft] * 2
    await fleet.joined(row(1))


async def test_a_late_replica_is_not_attached_to_but_serves_while_its_lease_lasts(fleet: Fleet) -> None:
    (replica,) = await fleet.joined(row(1))
    fleet.register(row(1), accepts=False)
    fleet.register(row(2), accepts=False)
    await fleet.all_handled()
    await fleet.submit("a")
    assert len(replica.link.added) == 1
    replica.link.say_dead()
    await eventually(lambda: replica.closed)
    assert fleet.attachments == [replica]
    fleet.register(row(1))
    await fleet.serving(1)


async def test_a_replica_whose_server_answers_late_gets_no_new_requests_and_finishes_those_it_has(fleet: Fleet) -> None:
    first, second = await fleet.joined(row(1), row(2))
    await fleet.submit("a")
    late, other = (first, second) if first.link.added else (second, first)
    late.on_late(True)
    await fleet.submit("b")
    await fleet.submit("c")
    assert (len(late.link.added), len(other.link.added)) == (1, 2)
    assert [sorted(member.cordons) for member in fleet.pool.members if member.cordons] == [["late"]]
    late.link.output(late.link.added[0], 5, finish_reason="stop")
    await fleet.all_handled()
    assert ("a", "stop") in await fleet.read()
    late.on_late(False)
    await fleet.serving(2)


async def test_a_replica_is_attached_to_anew_when_its_lease_ends_and_not_when_its_row_is_newer(fleet: Fleet) -> None:
    (replica,) = await fleet.joined(row(1))
    await fleet.submit("a")
    fleet.register(row(1, incarnation=2))
    await fleet.all_handled()
    assert fleet.attachments == [replica]
    replica.client.mark_dead("its server has restarted the engine")
    await eventually(lambda: len(fleet.attachments) == 2)
    await fleet.serving(1)
    assert fleet.attachments[1].info.incarnation == 2
    assert len(fleet.attachments[1].link.added) == 1
