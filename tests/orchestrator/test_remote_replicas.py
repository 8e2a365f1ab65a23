"""Replicas of other processes: attached while listed, cordoned, lost, detached. Links in memory."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import UNREADABLE
from tests.orchestrator.remote_fleet import Attachment, Fleet
from tests.orchestrator.test_replica_list import row
from vllm_omni_plugin.coordinator import HeadWork, ReplicaStatus, Welcome
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator.attachment.remote_keeper import (
    ALL_HEADS_LEAVE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
)
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import MAX_ATTACHING
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, OTHER_GENERATION
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaJoined, ReplicaLeft
from vllm_omni_plugin.replicas.control.lease_messages import AttachRefused
from vllm_omni_plugin.replicas.remote.remote_replica import AttachRefusedError


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet() as fleet:
        yield fleet


async def test_replicas_have_the_ids_of_the_list_so_that_all_heads_use_the_same_names(fleet: Fleet) -> None:
    fleet.register(row(1, replica_id=4))
    fleet.register(row(2, replica_id=0))
    # Of a coordinator that was restarted and gave a number that one of before it still has here.
    fleet.register(row(3, replica_id=4))
    await fleet.serving(3)
    assert {member.replica_id: member.input_addr for member in fleet.pool.members} == {
        0: row(2).input_addr,
        1: row(3).input_addr,
        4: row(1).input_addr,
    }


async def test_a_replica_gets_what_it_was_not_told_before_it_serves(fleet: Fleet) -> None:
    await fleet.joined(row(1))
    await fleet.call("set_weight_version", "v2")
    fleet.register(row(2))
    await fleet.serving(2)
    assert fleet.attachments[0].told == fleet.attachments[1].told != NOTHING_TOLD
    # Another head has told it everything.
    fleet.told_before = [fleet.attachments[0].told]
    fleet.register(row(3))
    await fleet.serving(3)
    calls = [[call[1:] for call in replica.link.calls] for replica in fleet.attachments[1:]]
    assert calls == [[("set_weight_version", ["v2"])], []]


@pytest.mark.parametrize("by_list", [True, False], ids=["from the list", "from its node"])
async def test_a_draining_replica_finishes_its_requests_and_is_detached(fleet: Fleet, by_list: bool) -> None:
    (replica,) = await fleet.joined(row(1))
    await fleet.submit("a")
    if by_list:
        fleet.register(row(1, status=ReplicaStatus.DRAINING), accepts=False)
    else:
        replica.on_status(ReplicaStatus.DRAINING)
    await fleet.serving(0)
    await fleet.all_handled()
    assert not replica.closed
    fleet.register(row(1, status=ReplicaStatus.DRAINING), accepts=False)
    replica.link.output(replica.link.added[0], 5, finish_reason="stop")
    await eventually(lambda: replica.closed)
    assert ("a", "stop") in await fleet.read()
    await fleet.all_handled()
    assert len(fleet.attachments) == 1


async def test_an_old_list_does_not_undo_the_status_from_the_node(fleet: Fleet) -> None:
    (replica,) = await fleet.joined(row(1))
    await fleet.submit("a")
    replica.on_status(ReplicaStatus.DRAINING)
    fleet.register(row(1, control_addr="tcp://n:7"))
    await fleet.all_handled()
    assert fleet.pool.serving == ()
    replica.on_status(ReplicaStatus.UP)
    assert len(fleet.pool.serving) == 1
    assert not replica.closed


async def test_a_replica_that_was_late_and_lost_is_not_said_to_answer_in_time_before_it_is_attached_again(
    fleet: Fleet,
) -> None:
    (replica,) = await fleet.joined(row(1))
    replica.on_late(True)
    assert "(replica 0 gets no new requests: its server answers late)" in str(fleet.pool.unavailable())
    fleet.may_attach.clear()
    replica.client.mark_dead("its machine does not answer")
    await eventually(lambda: fleet.attaching == 1)
    # The coordinator does not hear from it either.
    fleet.register(row(1, status=ReplicaStatus.ERROR), accepts=False)
    await fleet.all_handled()
    kinds = [event.kind.value for event in fleet.orchestrator.events.after()]
    assert kinds[-2:] == ["drain", "lost"]
    fleet.may_attach.set()
    await fleet.serving(1)
    assert [event.kind.value for event in fleet.orchestrator.events.after()][-2:] == ["resume", "attach"]


async def test_failures_are_tried_again_with_growing_pauses_and_logged_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.failures.extend([ReplicaError("nobody there")] * 8)
    fleet.register(row(1))
    await fleet.serving(1)
    assert fleet.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == ["Replica 0.0 cannot be attached to: nobody there"]
    fleet.unregister(row(1))
    await fleet.all_handled()
    fleet.attachments[0].link.say_dead()
    await eventually(lambda: not fleet.pool.members)
    kinds = [event.kind.value for event in fleet.orchestrator.events.after()]
    assert kinds[:2] == ["refuse", "attach"]
    assert kinds[-2:] == ["lost", "detach"]


async def test_a_lasting_refusal_is_tried_again_when_the_replica_has_changed(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.failures.append(AttachRefusedError(AttachRefused("model: head has a, replica b", lasting=True)))
    fleet.register(row(1))
    await eventually(lambda: "cannot be attached to: model: head has a, replica b" in caplog.text)
    fleet.register(row(1, last_heartbeat=9.0, queue_length=5))
    await fleet.all_handled()
    assert (fleet.attachments, fleet.pauses) == ([], [])
    fleet.register(row(1, incarnation=2))
    await fleet.serving(1)
    assert fleet.attachments[0].info.incarnation == 2


async def test_a_replica_of_another_generation_is_shown_and_tried_again_only_when_it_has_changed(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    differs = "vLLM version: head has 0.32.0, replica 0.33.0"
    refusal = AttachRefused(differs, lasting=True, other_generation=True, machines=["10.0.0.1", "10.0.0.2"])
    fleet.failures.extend([AttachRefusedError(refusal)] * 2)
    fleet.register(row(1, in_use=False))
    await eventually(lambda: fleet.pool.members and fleet.pool.members[0].other_generation)
    (member,) = fleet.pool.members
    assert (member.state, member.other_generation) == (OTHER_GENERATION, f"{differs}; no head of its kind")
    assert member.machines == ("10.0.0.1", "10.0.0.2"), "the probe of the second machine's pod asks any head"
    assert "replica 0 is other-generation" in str(fleet.pool.unavailable())
    fleet.register(row(1, in_use=True))
    await fleet.all_handled()
    assert (member.other_generation, fleet.pauses, len(fleet.failures)) == (differs, [], 1)
    fleet.register(row(1, incarnation=2, in_use=True))
    await eventually(lambda: not fleet.failures)
    fleet.register(row(1, incarnation=3))
    await fleet.serving(1)
    assert (member.state, member.other_generation) == ("up", "")
    told = [record for record in caplog.records if "of another generation" in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO"]


async def test_a_replica_that_was_of_another_generation_is_shown_as_what_it_is_now(fleet: Fleet) -> None:
    fleet.pause_over.clear()
    refusal = AttachRefused("dtype: head has a, replica b", lasting=True, other_generation=True)
    fleet.failures.append(AttachRefusedError(refusal))
    fleet.register(row(1))
    await eventually(lambda: fleet.pool.members and fleet.pool.members[0].other_generation)
    fleet.failures.append(ReplicaError("nobody there"))
    fleet.register(row(1, incarnation=2))
    await eventually(lambda: fleet.pauses)
    assert fleet.pool.members[0].state == "down"


async def test_a_replica_with_an_invalid_ready_response_is_refused_and_not_reported(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.joined(row(1))
    monkeypatch.setattr(Attachment, "ready_response", UNREADABLE)
    fleet.pause_over.clear()
    fleet.register(row(2))
    await eventually(lambda: fleet.pauses)
    await fleet.read()
    assert [change.replica_id for change in fleet.changes] == [0]
    assert [replica.closed for replica in fleet.attachments] == [False, True]
    refused = "Replica 0.1 cannot be attached to: its engine's ready response is invalid: not a"
    assert refused in caplog.text
    monkeypatch.setattr(Attachment, "ready_response", b"ready")
    fleet.pause_over.set()
    await fleet.serving(2)
    await fleet.read()
    assert [change.replica_id for change in fleet.changes] == [0, 1]


async def test_a_replica_that_fails_a_call_that_others_accepted_is_attached_to_anew(fleet: Fleet) -> None:
    first, _ = await fleet.joined(row(1), row(2))
    first.link.on_call = lambda link, call_id, method, args: link.refuse(call_id)
    await fleet.call("set_weight_version", "v2")
    await eventually(lambda: first.closed)
    await fleet.serving(2)
    assert fleet.pauses == [FIRST_PAUSE_S]


async def test_a_replica_that_is_taken_out_is_left_alone_until_all_heads_have_left_it(fleet: Fleet) -> None:
    (replica,) = await fleet.joined(row(1))
    exchange = fleet.pool.exchange = WorkExchange(lambda work, full: None)
    exchange.handle(Welcome(["other"]))
    exchange.handle(HeadWork("other", True, []))
    fleet.pause_over.clear()
    fleet.orchestrator.distrust(fleet.pool.member(0), "it failed a call that others took")
    await eventually(lambda: fleet.pauses)
    # Its node resets the engine, and may send a new status, only after that.
    fleet.register(row(1, incarnation=2))
    await fleet.all_handled()
    assert replica.closed
    assert (fleet.pauses, fleet.attachments) == ([ALL_HEADS_LEAVE_S], [replica])
    fleet.pause_over.set()
    await fleet.serving(1)


async def test_a_removed_replica_does_not_come_back_in_that_incarnation(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    (replica,) = await fleet.joined(row(1))
    await fleet.submit("a")
    fleet.remote.leave(fleet.pool.members[0])
    assert replica.drain_requested
    assert fleet.pool.members == ()
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
    await eventually(lambda: replica.closed)
    fleet.register(row(1, status=ReplicaStatus.DRAINING), accepts=False)
    fleet.register(row(1))
    await fleet.all_handled()
    assert fleet.pool.members == ()
    await fleet.joined(row(1, incarnation=2))
    assert len(fleet.attachments[1].link.added) == 1


async def test_a_replica_that_an_operator_drained_is_cordoned_when_it_is_listed_again(fleet: Fleet) -> None:
    await fleet.joined(row(1))
    await fleet.manage("drain", 0)
    for incarnation in (2, 3):
        fleet.unregister(row(1))
        await fleet.all_handled()
        fleet.attachments[-1].link.say_dead()
        fleet.register(row(1, incarnation=incarnation))
        await eventually(lambda incarnation=incarnation: len(fleet.attachments) == incarnation)  # type: ignore[misc]
        assert fleet.pool.members[0].cordons == {ADMIN_CORDON}
    await fleet.manage("resume", 0)
    assert fleet.pool.members[0].cordons == set()


async def test_a_replica_of_an_unknown_stage_is_tried_when_listed_until_it_refuses(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.failures.append(ReplicaError("nobody there"))
    fleet.register(row(1, stage_id=4))
    await eventually(lambda: "A replica of stage 4 cannot be attached to: nobody there" in caplog.text)
    fleet.failures.append(AttachRefusedError(AttachRefused("stage: head has 0, replica 4", lasting=True)))
    fleet.register(row(1, stage_id=4))
    await eventually(lambda: "A replica of stage 4 cannot be attached to: stage: head has 0, replica 4" in caplog.text)
    fleet.register(row(1, stage_id=4))
    await fleet.all_handled()
    assert (fleet.pool.members, fleet.attachments) == ((), [])


async def test_many_registrations_are_attached_to_in_bounded_parallel(fleet: Fleet) -> None:
    fleet.may_attach.clear()
    for number in range(MAX_ATTACHING + 20):
        fleet.register(row(number))
        fleet.register(row(number, stage_id=4))
    await fleet.all_handled()
    await eventually(lambda: fleet.attaching == MAX_ATTACHING)
    fleet.may_attach.set()
    await fleet.serving(MAX_ATTACHING + 20)
    assert fleet.most_attaching == MAX_ATTACHING


async def test_closing_detaches_from_all_moves_nothing_and_attaches_to_nothing_more(fleet: Fleet) -> None:
    replicas = await fleet.joined(row(1), row(2))
    await fleet.submit("a")
    await fleet.remote.close()
    await fleet.remote.close()
    assert all(replica.closed for replica in replicas)
    assert await fleet.read() == []
    fleet.register(row(3))
    await fleet.all_handled()
    assert fleet.attachments == replicas


async def test_two_hundred_joins_and_leaves_leave_nothing_behind(fleet: Fleet) -> None:
    await fleet.joined(row(0))
    tasks = len(asyncio.all_tasks())
    for number in range(1, 201):
        fleet.register(row(number))
        await fleet.serving(2)
        fleet.unregister(row(number))
        await fleet.all_handled()
        fleet.attachments[-1].link.say_dead()
        await eventually(lambda: fleet.attachments[-1].closed)
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)
    assert [member.replica_id for member in fleet.pool.members] == [0]
    await fleet.read()
    assert fleet.changes[1:] == [ReplicaJoined(0, 1, b"ready"), ReplicaLeft(0, 1)] * 200
