"""Replicas that start after a weight update: kept without requests until the next complete update has reached them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink, answer_calls, refuse_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.remote_fleet import Attachment, Fleet
from tests.orchestrator.test_replica_list import row
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState, StageState
from vllm_omni_plugin.orchestrator.pool.pool_member import WEIGHTS_CORDON

UP, DOWN, DRAINING = ReplicaStatus.UP, ReplicaStatus.DOWN, ReplicaStatus.DRAINING
WAITS = frozenset({WEIGHTS_CORDON})


def rpc(method: str, **named: Any) -> tuple[Any, ...]:
    return ("collective_rpc", method, None, [], named)


WHOLE_UPDATE = [rpc("start_weight_update"), rpc("update_weights", update_info={}), rpc("finish_weight_update")]
DRAFT_UPDATE = [rpc("start_draft_weight_update"), *WHOLE_UPDATE[1:]]


@pytest.fixture
async def fleet(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Fleet]:
    caplog.set_level(logging.INFO)
    async with Fleet() as fleet:
        yield fleet


async def updated(fleet: Fleet) -> list[Attachment]:
    """Two replicas whose weights were updated."""
    replicas = await fleet.joined(row(1), row(2))
    await update(fleet, WHOLE_UPDATE)
    return replicas


async def update(fleet: Fleet | FakeHead, calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        await fleet.call(*call)


async def restart(fleet: Fleet, replica: Attachment) -> Attachment:
    """The engine of a replica dies, and a fresh one is attached to."""
    return await attached_again(fleet, replica, replace(replica.info, incarnation=replica.info.incarnation + 1))


async def attached_again(fleet: Fleet, replica: Attachment, info: ReplicaInfo) -> Attachment:
    """A replica is lost, and attached to again."""
    count = len(fleet.attachments)
    fleet.register(info)
    await fleet.all_handled()
    replica.link.say_dead()
    await eventually(lambda: len(fleet.attachments) > count)
    member = next(member for member in fleet.pool.members if member.input_addr == replica.info.input_addr)
    await eventually(lambda: member.client is fleet.attachments[-1].client, "the attachment")
    return fleet.attachments[-1]


@pytest.mark.parametrize(
    "calls", [WHOLE_UPDATE, [rpc("reload_weights", weights_path="/step-2")], [rpc("reload_weights")]], ids=len
)
async def test_a_fresh_replica_waits_gets_the_next_complete_update_and_serves(
    fleet: Fleet, calls: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await updated(fleet)
    fresh = await restart(fleet, first)
    assert fleet.statuses == [DRAINING, UP]
    assert "Replica 0.0 gets no new requests: it waits for the next complete weight update" in caplog.text
    assert fresh.told.state.weights == "" != second.told.state.weights, "other heads hold it back, too"
    await update(fleet, calls)
    assert [args[0] for _, _, args in fresh.link.calls] == [args[1] for args in calls]
    assert fleet.statuses == [UP, UP]
    assert fresh.told.state.weights == second.told.state.weights != ""
    assert len(fleet.attachments) == 3, "nothing was restarted"


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("fresh_first", [False, True])
async def test_a_fresh_replica_waits_also_for_a_head_that_only_the_updated_ones_tell_of_an_update(
    fleet: Fleet, fresh_first: bool, files: bool
) -> None:
    told = [NOTHING_TOLD, ReplicaState(state=StageState(weights="12 of a head that is gone", are_files=files))]
    for number, before in enumerate(told if fresh_first else reversed(told), 1):
        fleet.told_before = [before]
        fleet.register(row(number))
        await eventually(lambda number=number: sum(each.client is not None for each in fleet.pool.members) == number)
    fresh = 0 if fresh_first else 1
    assert fleet.statuses[fresh] is (UP if files else DRAINING)
    assert fleet.statuses[1 - fresh] is UP
    await update(fleet, WHOLE_UPDATE)
    assert fleet.statuses == [UP, UP]


@pytest.mark.parametrize("missed", [[], WHOLE_UPDATE, [rpc("reload_weights")]], ids=len)
async def test_an_updated_replica_whose_lease_ended_serves_again_unless_it_missed_an_update(
    fleet: Fleet, missed: list[tuple[Any, ...]]
) -> None:
    first, second = await updated(fleet)
    fleet.pause_over.clear()
    second.link.say_dead()
    await eventually(lambda: fleet.statuses == [UP, DOWN])
    await update(fleet, missed)
    fleet.pause_over.set()
    await eventually(lambda: fleet.statuses == [UP, DRAINING if missed else UP])
    assert fleet.attachments[-1].info == second.info
    assert first.link.added == []


@pytest.mark.parametrize("calls", [DRAFT_UPDATE, WHOLE_UPDATE[:2], WHOLE_UPDATE[2:], [rpc("reset_weights")]])
async def test_a_fresh_replica_goes_on_to_wait_after_a_part_of_an_update(
    fleet: Fleet, calls: list[tuple[Any, ...]]
) -> None:
    first, _ = await updated(fleet)
    await restart(fleet, first)
    await update(fleet, calls)
    assert fleet.statuses == [DRAINING, UP]


async def test_a_fresh_replica_that_fails_an_update_is_neither_ended_nor_served(fleet: Fleet) -> None:
    first, _ = await updated(fleet)
    fresh = await restart(fleet, first)

    def needs_start(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
        link.refuse(call_id, "start_weight_update must be called before update_weights.")

    # It has come in the middle of an update.
    fresh.link.on_call = needs_start
    await update(fleet, [*WHOLE_UPDATE[1:], rpc("reload_weights", weights_path="/new")])
    assert fleet.statuses == [DRAINING, UP]
    fresh.link.on_call = answer_calls
    await update(fleet, WHOLE_UPDATE)
    assert (fleet.statuses, len(fleet.attachments)) == ([UP, UP], 3)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_replica_that_starts_during_an_update_waits_if_it_is_accepted(fleet: Fleet, refused: bool) -> None:
    first, second = await fleet.joined(row(1), row(2))
    for replica in (first, second):
        replica.link.on_call = None
    reply = fleet.ask(*rpc("update_weights"))
    await eventually(lambda: second.link.calls)
    await restart(fleet, first)
    (second.link.refuse if refused else second.link.answer)(second.link.calls[0][0])
    await asyncio.gather(asyncio.wrap_future(reply), return_exceptions=True)
    assert fleet.statuses == [UP if refused else DRAINING, UP]


async def test_without_any_updated_replica_it_is_said_and_one_call_makes_the_fresh_ones_serve(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await updated(fleet)
    await update(fleet, [rpc("reload_weights", weights_path="/step-2")])
    await restart(fleet, first)
    assert [event.kind.value for event in fleet.orchestrator.events.after()][-1] == "attach"
    await restart(fleet, second)
    assert fleet.statuses == [DRAINING, DRAINING]
    said = [event for event in fleet.orchestrator.events.after() if event.kind == "old_weights"]
    assert {event.stage for event in said} == {0}
    assert "No replica that has the updated weights is left: stage 0 serves after the next complete" in caplog.text
    why = "gets no new requests: it waits for the next complete weight update"
    assert f"(replica 0 {why}, replica 1 {why})" in str(fleet.pool.unavailable())
    await fleet.submit("a")
    await update(fleet, [rpc("reload_weights")])
    assert fleet.statuses == [UP, UP]
    assert [len(replica.link.added) for replica in fleet.attachments[2:]] in ([0, 1], [1, 0])


async def test_a_replica_that_attaches_during_an_update_waits(fleet: Fleet) -> None:
    (first,) = await fleet.joined(row(1))
    await fleet.call("set_weight_version", "v1")
    fleet.answers_calls = False
    fleet.register(row(2))
    await eventually(lambda: len(fleet.attachments) == 2)
    late = fleet.attachments[1].link
    await eventually(lambda: late.calls)
    await update(fleet, WHOLE_UPDATE)
    late.answer(late.calls[0][0])
    await eventually(lambda: fleet.statuses == [UP, DRAINING])
    assert [method for _, method, _ in late.calls] == ["set_weight_version"]
    assert len(fleet.attachments) == 2
    assert first.link.calls[-1][2][0] == "finish_weight_update"


@pytest.mark.parametrize("fails", [False, True])
async def test_all_heads_let_a_fresh_replica_serve_after_an_update_unless_it_failed(
    heads: list[FakeHead], fails: bool
) -> None:
    await update(heads[0], WHOLE_UPDATE)
    links = [FakeLink("replica-2") for _ in heads]
    for head, link in zip(heads, links, strict=True):
        link.on_call = refuse_calls if fails else answer_calls
        await head.bring_up(2, link=link)
    assert [head.pool.member(2).cordons for head in heads] == [WAITS] * 3
    await update(heads[1], WHOLE_UPDATE)
    assert [len(link.calls) for link in links] == [0, 3, 0], "one head calls it"
    assert [head.statuses for head in heads] == [[UP, UP, DRAINING if fails else UP]] * 3


async def test_own_replicas_of_a_head_that_missed_an_update_wait(bus: HeadBus, heads: list[FakeHead]) -> None:
    late = heads[2]
    own = late.attach(5, private=True)
    bus.cut(late)
    await update(heads[0], WHOLE_UPDATE)
    await late.join_fleet()
    assert late.statuses == [UP, UP, DRAINING]
    await update(heads[0], WHOLE_UPDATE)
    assert len(own.calls) == 3
    assert late.statuses == [UP, UP, UP]
