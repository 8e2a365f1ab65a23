"""Heads that come late, are cut off, miss messages or die in the middle of a call."""

import asyncio
import logging
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.links import refuse_calls
from tests.orchestrator.head_bus import SILENT, FakeHead, HeadBus
from tests.orchestrator.test_peer_calls import PAUSED, STORY, bring_up, seated, statuses
from vllm_omni_plugin.coordinator import NoSeatError, PeerAnswer, ReplicaStatus
from vllm_omni_plugin.errors import ReplicaError, WireError
from vllm_omni_plugin.orchestrator.membership import ADMIN_HOLD
from vllm_omni_plugin.orchestrator.peer_messages import mark_of


@pytest.fixture
async def heads(stack: AsyncExitStack, bus: HeadBus) -> list[FakeHead]:
    return [await seated(stack, bus, head_id) for head_id in "ab"]


async def late_head(stack: AsyncExitStack, bus: HeadBus) -> FakeHead:
    return await seated(stack, bus, "late", replicas=0)


async def test_a_head_that_comes_late_knows_everything(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("add_lora", STORY)
    await heads[1].call("sleep", 1, "keep")
    await heads[0].manage("drain", 1)
    late = await late_head(stack, bus)
    assert late.replay == heads[0].replay
    assert late.adapters == {"story": STORY}
    assert late.sleep_level == 1
    assert late.orchestrator.drained == heads[0].orchestrator.drained != set()


async def test_a_replica_that_others_have_told_is_not_told_again_by_a_late_head(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    late = await late_head(stack, bus)
    assert await bring_up(late, 0) == []
    assert await bring_up(late, 7) == [("pause_scheduler", ["keep", False])]


async def test_a_late_head_takes_replicas_whose_weights_were_updated_and_no_others(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("collective_rpc", "update_weights", None, [], {"update_info": {}})
    late = await late_head(stack, bus)
    assert await bring_up(late, 0) == []
    with pytest.raises(ReplicaError, match="weights were updated at run time"):
        await bring_up(late, 7)


async def test_a_replica_with_updated_weights_that_was_lost_from_sight_comes_back_while_others_see_it(
    heads: list[FakeHead],
) -> None:
    await heads[0].call("collective_rpc", "update_weights", None, [], {})
    heads[1].lose(0)
    heads[1].pool.remove(heads[1].pool.member(0))
    assert await bring_up(heads[1], 0) == []


async def test_a_replica_that_a_late_head_attaches_to_waits_until_it_knows_everything(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=0))
    bus.holding = True
    late.connect()
    attaching = asyncio.create_task(bring_up(late, 7))
    done, _ = await asyncio.wait([attaching], timeout=0.05)
    assert not done
    bus.release()
    assert await attaching == [("pause_scheduler", ["keep", False])]


async def test_the_replicas_that_only_a_late_head_reaches_are_told_what_it_learns(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=2))
    private = late.attach(5, private=True)
    await late.take_seat()
    assert [method for _, method, _ in private.calls] == ["pause_scheduler"]
    assert late.calls(0) == []


async def test_a_replica_that_cannot_be_told_what_a_late_head_learns_is_taken_out(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=0))
    late.attach(5, private=True).on_call = refuse_calls
    await late.take_seat()
    assert statuses(late) == [ReplicaStatus.ERROR]


async def test_a_late_head_hears_how_a_call_ends_whose_begin_it_did_not(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    for link in heads[0].links.values():
        link.on_call = None
    reply = heads[0].send("sleep", 1, "abort")
    await heads[1].until([("sleep", (1, "wait"))])
    late = await late_head(stack, bus)
    assert late.replay == [("sleep", (1, "wait"))]
    for link in heads[0].links.values():
        link.refuse(link.calls[0][0])
    with pytest.raises(ReplicaError):
        await asyncio.wrap_future(reply)
    await late.until([])


async def test_what_is_told_while_a_head_asks_for_everything_is_not_lost(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=0))
    bus.holding = True
    late.connect()
    await eventually(lambda: len(bus.sent) and bus.sent[-1][0] == "state")
    bus.deliver(2)
    call = asyncio.create_task(heads[0].call("pause_scheduler", "keep", True))
    await eventually(lambda: heads[0].links[0].calls)
    bus.release()
    await call
    await late.until(PAUSED)


async def test_a_call_that_is_refused_after_a_late_head_heard_of_it_twice_leaves_no_record_there(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    for link in heads[0].links.values():
        link.on_call = None
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=0))
    bus.holding = True
    late.connect()
    await eventually(lambda: len(bus.sent) and bus.sent[-1][0] == "state")
    reply = heads[0].send("pause_scheduler", "keep", True)
    await eventually(lambda: heads[0].links[0].calls)
    bus.release()
    await late.until(PAUSED)
    for link in heads[0].links.values():
        link.refuse(link.calls[0][0])
    with pytest.raises(ReplicaError):
        await asyncio.wrap_future(reply)
    await late.until([])


async def test_a_head_that_finds_nobody_serves_without_waiting(bus: HeadBus, stack: AsyncExitStack) -> None:
    alone = await seated(stack, bus, "alone")
    assert await alone.call("pause_scheduler", "keep", True) == ["pause_scheduler"] * 2


async def test_a_head_that_does_not_answer_holds_no_call_up_and_catches_up(
    bus: HeadBus, heads: list[FakeHead], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bus.deaf.add("b")
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2
    assert heads[1].replay == []
    assert f"Other heads have not taken engine-call yet: b ({SILENT})." in caplog.text
    bus.deaf.clear()
    heads[0].may_remind.set()
    await heads[1].until(PAUSED)


async def test_a_head_that_missed_a_call_sees_that_with_the_next(bus: HeadBus, heads: list[FakeHead]) -> None:
    bus.deaf.add("b")
    await heads[0].call("add_lora", STORY)
    bus.deaf.clear()
    await heads[0].call("set_weight_version", "v2")
    await eventually(lambda: heads[1].replay == heads[0].replay)
    assert heads[1].adapters == {"story": STORY}


async def test_heads_that_could_not_reach_each_other_agree_on_the_later_state(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[1].call("add_lora", STORY)
    assert heads[0].adapters == {"story": STORY}
    for head in heads:
        head.peers.peers_lost(None)
    said = len(bus.sent)
    await heads[0].call("set_weight_version", "a")
    await heads[1].call("set_weight_version", "b")
    await heads[1].call("forget_lora", 7)
    await heads[0].manage("drain", 0)
    assert len(bus.sent) == said
    for head in heads:
        head.peers.synchronise()
    await eventually(lambda: heads[0].replay == heads[1].replay == [("set_weight_version", ("b",))])
    await eventually(lambda: heads[0].adapters == {})
    await eventually(lambda: [h.pool.member(0).held_back for h in heads] == [frozenset()] * 2)


async def test_a_head_that_was_asked_before_it_knew_everything_is_told_that_there_is_more(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    bus.deaf.add("b")
    await heads[0].call("pause_scheduler", "keep", True)
    bus.deaf.clear()
    heads[0].peers.synchronise()
    await heads[1].until(PAUSED)


async def test_a_head_whose_seat_is_gone_when_it_tells_of_a_call_goes_on(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: Any) -> Future[list[PeerAnswer]]:
        reply: Future[list[PeerAnswer]] = Future()
        reply.set_exception(NoSeatError("no seat"))
        return reply

    monkeypatch.setattr(heads[0].seat, "call", call)
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2
    assert heads[0].replay == PAUSED


async def test_a_call_too_large_for_other_heads_is_made_and_reported(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def call(*_: Any) -> Future[list[PeerAnswer]]:
        raise WireError("300 KiB")

    monkeypatch.setattr(heads[0].seat, "call", call)
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2
    assert "Other heads cannot be told of engine-call: 300 KiB" in caplog.text


async def test_a_drain_that_a_head_missed_is_made_up_for(bus: HeadBus, heads: list[FakeHead]) -> None:
    bus.deaf.add("b")
    await heads[0].manage("drain", 1)
    bus.deaf.clear()
    heads[1].peers.synchronise()
    await eventually(lambda: heads[1].pool.member(1).held_back == {ADMIN_HOLD})


async def test_a_call_whose_head_dies_is_made_again(stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]) -> None:
    third = await seated(stack, bus, "c")
    for link in heads[0].links.values():
        link.on_call = None
    heads[0].send("add_lora", STORY)
    await third.until([("add_lora", (STORY,))])
    heads[0].leave()
    for head in (heads[1], third):
        await eventually(lambda head=head: head.adapters == {"story": STORY})  # type: ignore[misc]
        assert head.calls(0) == [("add_lora", [["story", 7, "/loras/story", None, False, False, ""]])]
        assert head.replay == [("add_lora", (STORY,))]


async def test_a_call_whose_head_dies_and_that_engines_refuse_leaves_no_record(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    for link in heads[0].links.values():
        link.on_call = None
    heads[0].send("add_lora", STORY)
    await heads[1].until([("add_lora", (STORY,))])
    for link in heads[1].links.values():
        link.on_call = refuse_calls
    heads[0].leave()
    await heads[1].until([])
    assert heads[1].adapters == {}
    assert statuses(heads[1]) == [ReplicaStatus.UP] * 2


async def test_a_call_whose_head_died_is_not_made_again_over_a_later_one(bus: HeadBus, heads: list[FakeHead]) -> None:
    for link in heads[0].links.values():
        link.on_call = None
    heads[0].send("pause_scheduler", "keep", True)
    await heads[1].until(PAUSED)
    await heads[1].call("resume_scheduler")
    heads[0].leave()
    await heads[1].until([])
    assert [method for method, _ in heads[1].calls(0)] == ["resume_scheduler"]


async def test_an_update_of_weights_whose_head_dies_is_not_made_twice(bus: HeadBus, heads: list[FakeHead]) -> None:
    for link in heads[0].links.values():
        link.on_call = None
    heads[0].send("collective_rpc", "update_weights", None, [], {})
    stage = heads[1].orchestrator.fan_out.stages[0]
    await eventually(lambda: stage.shared.unreplayable)
    heads[0].leave()
    await asyncio.sleep(0)
    assert heads[1].calls(0) == []
    assert stage.shared.unreplayable


async def test_the_same_start_of_a_replica_has_the_same_mark_in_all_heads(heads: list[FakeHead]) -> None:
    marks = [[mark_of(member) for member in head.pool.members] for head in heads]
    assert marks[0] == marks[1]
    heads[0].pool.member(0).incarnation = 1
    assert mark_of(heads[0].pool.member(0)) != marks[0][0]
