"""Heads that come late, lose the coordinator, or die in the middle of a call."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.links import answer_calls, refuse_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus, joined
from tests.orchestrator.test_fleet_calls import PAUSED, STORY
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.head_messages import CallOutcome, OperatorCall
from vllm_omni_plugin.errors import CoordinatorUnavailableError, ReplicaError
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, WEIGHTS_CORDON
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter


async def test_a_late_head_gets_the_whole_state(stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]) -> None:
    await heads[0].call("add_lora", STORY)
    await heads[1].call("sleep", 1, "keep")
    await heads[0].manage("drain", 1)
    late = await joined(stack, bus, "late")
    assert late.replay == heads[0].replay
    await eventually(lambda: (late.adapters, late.sleep_level) == ({"story": STORY}, 1))
    assert late.pool.member(1).cordons == {ADMIN_CORDON}
    assert late.orchestrator.drained == heads[0].orchestrator.drained != set()
    assert late.calls(0) == [], "the other heads have called it"


@pytest.mark.parametrize(
    ("call", "adapters", "level"),
    [(("add_lora", STORY), {"story": STORY}, 0), (("sleep", 2, "abort"), {}, 2)],
    ids=["an adapter", "sleep"],
)
async def test_the_server_of_a_late_head_is_notified_of_a_single_difference(
    stack: AsyncExitStack,
    bus: HeadBus,
    heads: list[FakeHead],
    call: tuple[Any, ...],
    adapters: dict[str, Adapter],
    level: int,
) -> None:
    await heads[0].call(*call)
    late = await joined(stack, bus, "late")
    await eventually(lambda: (late.adapters, late.sleep_level) == (adapters, level))


async def test_a_replica_synced_by_another_head_gets_no_replay_and_may_have_updated_weights(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("collective_rpc", "update_weights", None, [], {"update_info": {}})
    await heads[0].call("pause_scheduler", "keep", True)
    late = await joined(stack, bus, "late", replicas=0)
    assert await late.bring_up(0, synced=True) == []
    assert await late.bring_up(7) == [("pause_scheduler", ["keep", False])]
    assert [member.cordons for member in late.pool.members] == [frozenset(), {WEIGHTS_CORDON}]


@pytest.mark.parametrize("refuses", [False, True])
async def test_private_replicas_of_a_late_head_get_the_missed_calls_or_are_taken_out(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead], refuses: bool
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=0))
    private = late.attach(5, private=True)
    if refuses:
        private.on_call = refuse_calls
    await late.join_fleet()
    await eventually(lambda: private.calls)
    assert [method for _, method, _ in private.calls] == ["pause_scheduler"]
    await eventually(lambda: late.statuses == [ReplicaStatus.ERROR if refuses else ReplicaStatus.UP])
    late.resync()
    # A head follows in order: when it has this call, it has handled the resync.
    await heads[0].call("add_lora", STORY)
    await eventually(lambda: late.adapters == {"story": STORY})
    repeated = [method for _, method, _ in private.calls].count("pause_scheduler") - 1
    assert repeated == 0


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_call_does_not_overtake_the_missed_calls_to_a_private_replica(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead], refuses: bool
) -> None:
    await heads[0].call("add_lora", STORY)
    await heads[0].call("pause_scheduler", "keep", True)
    late = await stack.enter_async_context(FakeHead(bus, "late", replicas=0))
    private = late.attach(5, private=True)
    private.on_call = None
    await late.join_fleet()
    await eventually(lambda: private.calls)
    reply = heads[0].ask("resume_scheduler")
    await late.until([("add_lora", (STORY,))])
    private.on_call = answer_calls
    (private.refuse if refuses else private.answer)(private.calls[0][0])
    assert len(await asyncio.wrap_future(reply)) == 2
    expected = ["add_lora"] if refuses else ["add_lora", "pause_scheduler", "resume_scheduler"]
    assert [method for _, method, _ in private.calls] == expected


async def test_a_refused_call_leaves_no_record_in_a_head_that_got_it_by_snapshot(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    reply = heads[0].ask_unanswered("pause_scheduler", "keep", True)
    await heads[1].until(PAUSED)
    late = await joined(stack, bus, "late", replicas=0)
    assert late.replay == PAUSED
    for link in heads[0].links.values():
        link.refuse(link.calls[0][0])
    with pytest.raises(ReplicaError):
        await asyncio.wrap_future(reply)
    await late.until([])


async def test_a_single_head_needs_no_coordinator_and_reports_its_state_later(
    stack: AsyncExitStack, bus: HeadBus
) -> None:
    alone = await joined(stack, bus, "alone")
    bus.cut(alone)
    assert len(await alone.call("pause_scheduler", "keep", True)) == 2
    await alone.manage("drain", 1)
    await alone.join_fleet()
    late = await joined(stack, bus, "late")
    await late.until(PAUSED)
    assert late.pool.member(1).cordons == {ADMIN_CORDON}


async def test_a_call_is_refused_without_a_coordinator_if_there_are_other_heads(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    for head in heads:
        bus.cut(head, noticed=False)
    for attempt in (heads[0].call("pause_scheduler", "keep", True), heads[0].manage("drain", 1)):
        with pytest.raises(CoordinatorUnavailableError, match="coordinator"):
            await attempt
    assert heads[0].calls(0) == []
    assert heads[0].pool.member(1).cordons == frozenset()
    assert await heads[0].call("is_sleeping") == ["is_sleeping"] * 2
    assert await heads[0].bring_up(4) == []
    for head in heads:
        await head.join_fleet()
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 3


async def test_a_new_coordinator_gets_the_fleets_state_from_the_heads(bus: HeadBus, heads: list[FakeHead]) -> None:
    await heads[0].call("add_lora", STORY)
    bus.cut(heads[2])
    await heads[0].manage("drain", 1)
    for head in heads[:2]:
        bus.cut(head)
    bus.start()
    for head in reversed(heads):
        await head.join_fleet()
    bus.settle()
    await eventually(lambda: heads[2].pool.member(1).cordons == {ADMIN_CORDON})
    await heads[2].call("set_weight_version", "v2")
    assert [head.replay for head in heads] == [[("add_lora", (STORY,)), ("set_weight_version", ("v2",))]] * 3


async def test_a_call_waits_for_the_heads_that_a_new_coordinator_does_not_know_yet(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("add_lora", STORY)
    for head in heads:
        bus.cut(head)
    bus.start()
    fresh = await joined(stack, bus, "fresh")
    reply = fresh.ask("pause_scheduler", "keep", True)
    for head in heads:
        await head.join_fleet()
    bus.settle()
    assert len(await asyncio.wrap_future(reply)) == 2
    assert [head.replay for head in (fresh, *heads)] == [[("add_lora", (STORY,)), *PAUSED]] * 4


async def test_calls_waiting_for_a_new_coordinator_are_not_made_after_their_callers_got_an_error(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    for head in heads:
        bus.cut(head)
    bus.start()
    await heads[0].join_fleet()
    reply = heads[0].ask("pause_scheduler", "keep", True)
    await eventually(lambda: bus.calls)
    await heads[0].join_fleet()
    with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
        await asyncio.wrap_future(reply)
    bus.settle()
    await heads[0].call("add_lora", STORY)
    assert heads[0].replay == [("add_lora", (STORY,))]


@pytest.mark.parametrize("outcome", ["is lost with the session", "comes before the resync"])
async def test_a_head_that_resyncs_during_a_call_learns_which_replicas_failed(
    bus: HeadBus, heads: list[FakeHead], outcome: str
) -> None:
    reply = heads[0].ask_unanswered("sleep", 1, "abort")
    await eventually(lambda: heads[0].links[1].calls)
    if outcome == "comes before the resync":
        bus.overflow(heads[1])
    else:
        bus.delayed.add("b")
    heads[0].links[0].answer(heads[0].links[0].calls[0][0])
    heads[0].links[1].refuse(heads[0].links[1].calls[0][0])
    if outcome == "is lost with the session":
        await eventually(lambda: heads[2].statuses == [ReplicaStatus.UP, ReplicaStatus.ERROR])
        bus.delayed.clear()
        bus.connect(heads[1])
    await asyncio.wrap_future(reply)
    assert [head.statuses for head in heads] == [[ReplicaStatus.UP, ReplicaStatus.ERROR]] * 3


async def test_a_call_whose_head_dies_is_repeated_by_one_other_head(bus: HeadBus, heads: list[FakeHead]) -> None:
    heads[0].ask_unanswered("add_lora", STORY)
    await heads[2].until([("add_lora", (STORY,))])
    bus.cut(heads[0])
    for head in heads[1:]:
        await eventually(lambda head=head: head.adapters == {"story": STORY})  # type: ignore[misc]
        assert head.replay == [("add_lora", (STORY,))]
    assert sorted(len(head.calls(0)) for head in heads[1:]) == [0, 1]


async def test_a_call_whose_head_dies_and_that_engines_refuse_leaves_no_record(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    heads[0].ask_unanswered("add_lora", STORY)
    await heads[2].until([("add_lora", (STORY,))])
    for head in heads[1:]:
        head.answer_with(refuse_calls)
    bus.cut(heads[0])
    for head in heads[1:]:
        await head.until([])
        assert head.adapters == {}
        assert head.statuses == [ReplicaStatus.UP] * 2


async def test_a_refused_call_whose_head_dies_leaves_no_record_in_a_head_that_got_it_by_snapshot(
    stack: AsyncExitStack, bus: HeadBus
) -> None:
    caller = await joined(stack, bus, "caller")
    caller.ask_unanswered("add_lora", STORY)
    await caller.until([("add_lora", (STORY,))])
    late = await joined(stack, bus, "late")
    assert late.replay == caller.replay
    late.answer_with(refuse_calls)
    bus.cut(caller)
    await late.until([])
    await eventually(lambda: late.adapters == {})
    assert late.statuses == [ReplicaStatus.UP] * 2


@pytest.mark.parametrize(
    "call", [("pause_scheduler", "keep", True), ("collective_rpc", "update_weights", None, [], {})], ids=str
)
async def test_a_call_whose_head_dies_is_not_repeated_after_a_later_call_or_if_it_updates_weights(
    bus: HeadBus, heads: list[FakeHead], call: tuple[Any, ...]
) -> None:
    heads[0].ask_unanswered(*call)
    stage = heads[1].orchestrator.stage_calls[0]
    await eventually(lambda: heads[1].replay == PAUSED or stage.shared.weights_changed)
    if heads[1].replay == PAUSED:
        await heads[1].call("resume_scheduler")
    bus.cut(heads[0])
    await heads[2].call("set_weight_version", "later")
    assert [method for method, _ in heads[1].calls(0)] in ([], ["resume_scheduler"])
    assert heads[1].replay == heads[2].replay == [("set_weight_version", ("later",))]


@pytest.mark.parametrize("unsaid", [OperatorCall, CallOutcome])
async def test_a_caller_that_cannot_reach_the_coordinator_gets_an_error(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch, unsaid: type
) -> None:
    send = heads[0].send
    monkeypatch.setattr(heads[0], "send", lambda message: not isinstance(message, unsaid) and send(message))
    for attempt in (heads[0].call("set_weight_version", "v2"), heads[0].manage("drain", 1)):
        with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
            await attempt


async def test_a_caller_that_loses_the_coordinator_during_its_call_gets_an_error(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    reply = heads[0].ask_unanswered("set_weight_version", "v2")
    await eventually(lambda: heads[0].links[1].calls)
    bus.cut(heads[0])
    heads[0].answer_last()
    with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
        await asyncio.wrap_future(reply)
    assert heads[0].replay == [("set_weight_version", ("v2",))], "until it knows better"


@pytest.mark.parametrize("ends", ["accepted", "refused"])
async def test_a_call_that_is_sent_while_its_head_is_resynced_comes_to_its_end(
    bus: HeadBus, heads: list[FakeHead], ends: str
) -> None:
    bus.delayed.add("a")
    bus.overflow(heads[0])
    bus.wake()
    await eventually(lambda: heads[0].inbox, "the resync")
    for head in heads:
        head.answer_with(answer_calls if ends == "accepted" else refuse_calls)
    reply = heads[0].ask("add_lora", STORY)
    await heads[1].until([("add_lora", (STORY,))])
    bus.deliver_delayed()
    with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
        await asyncio.wrap_future(reply)
    for head in heads:
        await head.until([("add_lora", (STORY,))] if ends == "accepted" else [])


@pytest.mark.parametrize("when", ["before its outcome", "after its outcome"])
async def test_a_server_whose_call_was_lost_gets_the_state_of_the_fleet(
    bus: HeadBus, heads: list[FakeHead], when: str
) -> None:
    if when == "before its outcome":
        heads[0].stop_answering()
    bus.delayed.add("b")
    reply = heads[0].ask("add_lora", STORY)
    if when == "before its outcome":
        await eventually(lambda: heads[0].links[1].calls)
    else:
        await eventually(lambda: heads[2].adapters)
    bus.cut(heads[0])
    bus.delayed.clear()
    if when == "before its outcome":
        heads[0].answer_last()
    with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
        await asyncio.wrap_future(reply)
    await heads[0].join_fleet()
    for head in heads:
        await eventually(lambda head=head: head.adapters == {"story": STORY})  # type: ignore[misc]


async def test_a_server_whose_call_was_lost_and_refused_has_no_record_of_it(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    reply = heads[0].ask_unanswered("add_lora", STORY)
    await eventually(lambda: heads[0].links[1].calls)
    for head in heads[1:]:
        head.answer_with(refuse_calls)
    bus.cut(heads[0])
    await heads[1].until([])
    await heads[0].join_fleet()
    await heads[0].until([])
    heads[0].answer_last()
    with pytest.raises(CoordinatorUnavailableError):
        await asyncio.wrap_future(reply)
    # Updates to AsyncLLM come in order.
    other = Adapter("other", 8, "/loras/other")
    heads[1].answer_with(answer_calls)
    await heads[1].call("add_lora", other)
    await eventually(lambda: heads[0].adapters)
    assert heads[0].adapters == {"other": other}


async def test_a_call_that_one_head_takes_over_twice_comes_to_its_end(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    caller, again, between = heads
    other = await joined(stack, bus, "other")
    for head in heads:
        head.stop_answering()
    caller.ask("add_lora", STORY)
    await eventually(lambda: caller.links[1].calls)
    bus.cut(caller)
    await eventually(lambda: again.links[1].calls)
    bus.connect(again)
    await eventually(lambda: between.links[1].calls)
    bus.cut(between)
    await eventually(lambda: len(again.links[1].calls) == 2)
    for attempt in range(2):
        for link in again.links.values():
            link.answer(link.calls[attempt][0])
        await asyncio.sleep(0)
    await eventually(lambda: other.adapters == {"story": STORY})


async def test_a_head_that_does_not_answer_delays_a_call_until_it_has_left(bus: HeadBus, heads: list[FakeHead]) -> None:
    bus.delayed.add("b")
    reply = heads[0].ask("pause_scheduler", "keep", True)
    await heads[2].until(PAUSED)
    await eventually(lambda: heads[0].links[0].calls)
    assert not reply.done()
    bus.cut(heads[1])
    assert len(await asyncio.wrap_future(reply)) == 2
