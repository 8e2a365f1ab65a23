"""Heads that come late, lose the coordinator and connect to it again, or die in the middle of a call."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink, answer_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus, joined
from tests.orchestrator.test_fleet_calls import PAUSED, STORY
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHead,
    OmniCoordinator,
    ReplicaStatus,
    ReplicaWork,
    SessionLost,
    Welcome,
)
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, ReplicaState, StageState
from vllm_omni_plugin.coordinator.protocol.head_messages import FleetCall
from vllm_omni_plugin.errors import CoordinatorUnavailableError, NoReplicaError
from vllm_omni_plugin.orchestrator import SessionListener
from vllm_omni_plugin.orchestrator.fleet_state import call_session
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, WEIGHTS_CORDON


async def test_a_replica_that_another_head_has_told_everything_gets_no_calls_and_has_the_weights(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("collective_rpc", "update_weights", None, [], {"update_info": {}})
    await heads[0].call("pause_scheduler", "keep", True)
    late = await joined(stack, bus, "late", replicas=0)
    assert await late.bring_up(0, heads[0].pool.member(0).told) == []
    assert await late.bring_up(7) == [("pause_scheduler", ["keep", False])]
    assert [member.cordons for member in late.pool.members] == [frozenset(), {WEIGHTS_CORDON}]


async def test_a_replica_that_knows_a_later_call_than_its_head_is_left_alone(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    bus.delayed.add("b")
    heads[0].ask("resume_scheduler")
    await heads[2].until([])
    assert heads[1].replay == PAUSED
    assert await heads[1].bring_up(7, heads[0].pool.member(0).told) == []
    bus.deliver_delayed()
    await heads[1].until([])


async def test_a_replica_that_the_heads_before_have_left_asleep_is_woken_if_an_operator_has_woken_the_fleet(
    heads: list[FakeHead],
) -> None:
    asleep = StageState()
    asleep.pause.sleep(1, "wait")
    left = ReplicaState(state=asleep)
    assert await heads[0].bring_up(7, left) == []
    await heads[0].call("resume_scheduler")
    assert await heads[0].bring_up(8, left) == [("wake_up", [None])]


async def test_an_engine_gets_the_pause_with_the_call_that_resumes_it_and_computes_nothing_between(
    heads: list[FakeHead],
) -> None:
    asleep = StageState()
    asleep.pause.sleep(1, "keep")
    await heads[0].call("pause_scheduler", "keep", True)
    heads[0].stop_answering()
    restored, attached = heads[0].links[0], FakeLink("attached")
    restored.calls.clear()
    tasks = [
        asyncio.create_task(heads[0].orchestrator.stage_calls[0].restore_pause()),
        asyncio.create_task(heads[0].bring_up(8, ReplicaState(state=asleep), attached)),
    ]
    for link in (restored, attached):
        await eventually(lambda link=link: link.calls)
        assert [method for _, method, _ in link.calls] == ["wake_up", "pause_scheduler"]
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_call_does_not_overtake_the_missed_calls_to_a_private_replica_and_one_that_refuses_is_taken_out(
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
    for _ in range(9):
        # It could be called by now.
        await asyncio.sleep(0)
    private.on_call = answer_calls
    (private.refuse if refuses else private.answer)(private.calls[0][0])
    assert len(await asyncio.wrap_future(reply)) == 2
    assert late.statuses == [ReplicaStatus.ERROR if refuses else ReplicaStatus.UP]
    expected = ["add_lora"] if refuses else ["add_lora", "pause_scheduler", "resume_scheduler"]
    assert [method for _, method, _ in private.calls] == expected


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


async def test_a_call_waits_for_the_heads_that_a_new_coordinator_does_not_know_yet(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("add_lora", STORY)
    for head in heads:
        bus.cut(head)
    bus.start()
    fresh = await stack.enter_async_context(FakeHead(bus, "fresh"))
    bus.connect(fresh)
    reply = fresh.ask("pause_scheduler", "keep", True)
    for head in heads:
        bus.connect(head)
    await eventually(lambda: all(head.fleet_calls.session.refusal is None for head in (fresh, *heads)))
    bus.settle()
    assert len(await asyncio.wrap_future(reply)) == 2
    assert [head.replay for head in (fresh, *heads)] == [[("add_lora", (STORY,)), *PAUSED]] * 4


async def test_a_new_coordinator_gets_the_document_from_the_first_head_that_is_back(
    stack: AsyncExitStack, bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    for head in heads:
        bus.cut(head)
    await eventually(lambda: heads[0].fleet_calls.session.refusal is not None)
    bus.start()
    fresh = await stack.enter_async_context(FakeHead(bus, "fresh"))
    bus.connect(fresh)
    bus.connect(heads[0])
    await eventually(lambda: heads[0].fleet_calls.session.refusal is None and not heads[0].session.frames)
    bus.cut(heads[0])
    bus.settle()
    await fresh.until(PAUSED)


@pytest.mark.parametrize("when", ["before the engines answer", "before the coordinator answers"])
async def test_a_caller_that_loses_the_coordinator_gets_an_error_and_reports_the_call_later(
    bus: HeadBus, heads: list[FakeHead], when: str
) -> None:
    if when == "before the engines answer":
        reply = heads[0].ask_unanswered("add_lora", STORY)
        await eventually(lambda: heads[0].links[1].calls)
        bus.cut(heads[0])
        heads[0].answer_last()
    else:
        bus.delayed.add("a")
        reply = heads[0].ask("add_lora", STORY)
        await eventually(lambda: heads[2].adapters)
        bus.cut(heads[0])
        bus.delayed.clear()
    with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
        await asyncio.wrap_future(reply)
    await eventually(lambda: heads[0].adapters == {"story": STORY}, "AsyncLLM takes the error for a failed call")
    await heads[0].join_fleet()
    for head in heads:
        await eventually(lambda head=head: head.adapters == {"story": STORY})  # type: ignore[misc]
    assert [head.calls(0) for head in heads[1:]] == [[], []], "the engines have it"


async def test_a_caller_whose_call_was_lost_with_its_session_gets_an_error_and_the_others_learn_of_the_call(
    bus: HeadBus, heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = heads[0].send, list[FleetCall]()

    def send_over_a_session_that_ends(message: Any) -> bool:
        if isinstance(message, FleetCall) and not lost:
            lost.append(message)
            bus.connect(heads[0])
            return True
        return send(message)

    monkeypatch.setattr(heads[0], "send", send_over_a_session_that_ends)
    with pytest.raises(CoordinatorUnavailableError, match="lost during the call"):
        await heads[0].call("add_lora", STORY)
    for head in heads:
        await eventually(lambda head=head: head.adapters == {"story": STORY})  # type: ignore[misc]


async def test_closing_ends_what_a_replica_has_still_to_be_told(stack: AsyncExitStack, bus: HeadBus) -> None:
    async with FakeHead(bus, "a") as head:
        await head.join_fleet()
        await head.call("pause_scheduler", "keep", True)
        async with FakeHead(bus, "late", replicas=0) as late:
            late.attach(5, private=True).on_call = None
            await late.join_fleet()
            await eventually(lambda: late.calls(5))
    await eventually(lambda: [t for t in asyncio.all_tasks() if t.get_name().startswith("omni")] == [])


async def test_heads_that_changed_their_documents_apart_agree_on_the_later_one_and_so_do_their_engines(
    stack: AsyncExitStack, bus: HeadBus
) -> None:
    one, other = [await stack.enter_async_context(FakeHead(bus, name, replicas=0)) for name in "ab"]
    for head in (one, other):
        head.own = head.attach(0, private=True)  # type: ignore[attr-defined]
        await head.join_fleet()
        bus.cut(head)
        await head.call("pause_scheduler", "keep", True)
    await other.call("resume_scheduler")
    assert (one.fleet_calls.state.version, other.fleet_calls.state.version) == (1, 2)
    for head in (one, other):
        await head.join_fleet()
    await eventually(lambda: one.fleet_calls.state == other.fleet_calls.state)
    assert (one.fleet_calls.state.version, one.replay) == (2, [])
    await eventually(lambda: one.calls(0)[-1] == ("resume_scheduler", []))


class ConnectedHead(FakeHead):
    """A head whose client is `OmniCoordClientForHead`."""

    def __init__(self, head_id: str, coordinator: str) -> None:
        super().__init__(HeadBus(), head_id)
        listener = SessionListener(self.orchestrator.rpc_async_queue)
        self.client = OmniCoordClientForHead(coordinator, head_id, listener)
        self.send = self.client.send  # type: ignore[method-assign]

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        self.client.report_work(work, full=full)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.close)
        await super().__aexit__()


async def connected(stack: AsyncExitStack, head_id: str, coordinator: OmniCoordinator) -> ConnectedHead:
    head = await stack.enter_async_context(ConnectedHead(head_id, coordinator.router_zmq_addr))
    await eventually(lambda: head.fleet_calls.session.refusal is None)
    await head.fleet_calls.session.wait_synced()
    return head


async def test_a_call_waits_for_the_session_of_its_head(bus: HeadBus) -> None:
    async with FakeHead(bus, "a") as head:
        reply = asyncio.wrap_future(head.ask("pause_scheduler", "keep", True))
        done, _ = await asyncio.wait([reply], timeout=0.02)
        assert not done
        await head.join_fleet()
        assert await reply == ["pause_scheduler"] * 2


async def test_a_call_of_one_head_holds_for_all_heads_and_survives_the_coordinator(stack: AsyncExitStack) -> None:
    coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    first, second = [await connected(stack, head_id, coordinator) for head_id in "ab"]
    await first.call("pause_scheduler", "keep", True)
    assert second.replay == PAUSED
    await second.call("add_lora", STORY)
    assert first.adapters == {"story": STORY}
    await second.manage("drain", 1)
    address, pub = coordinator.router_zmq_addr, coordinator.pub_zmq_addr
    await asyncio.to_thread(coordinator.close)
    await eventually(lambda: first.fleet_calls.session.refusal is not None)
    with pytest.raises(CoordinatorUnavailableError):
        await first.call("resume_scheduler")
    coordinator = await asyncio.to_thread(OmniCoordinator, address, pub)
    stack.callback(coordinator.close)
    await eventually(lambda: first.fleet_calls.session.refusal is None and second.fleet_calls.session.refusal is None)
    late = await connected(stack, "c", coordinator)
    await late.until(first.replay)
    await eventually(lambda: late.adapters == {"story": STORY})
    await late.call("resume_scheduler")
    assert first.replay == second.replay == [("add_lora", (STORY,))]
    assert [head.pool.member(1).cordons for head in (first, second, late)] == [{"admin"}] * 3


async def test_an_attaching_replica_waits_until_its_head_is_synced_again(heads: list[FakeHead]) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    heads[1].fleet_calls.handle(SessionLost())
    heads[1].fleet_calls.handle(Welcome(["a", "c"]))
    attaching = asyncio.create_task(heads[1].bring_up(2))
    await asyncio.wait([attaching], timeout=0.02)
    assert not attaching.done()
    heads[1].fleet_calls.handle(FleetState(2, "a"))
    assert await attaching == []


async def test_a_head_that_loses_the_coordinator_before_its_first_state_does_not_wait(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_session, "FIRST_STATE_TIMEOUT_S", 600.0)
    heads[0].fleet_calls.handle(Welcome([]))
    heads[0].fleet_calls.handle(SessionLost())
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2


@pytest.mark.parametrize("lost", ["while it waits for the document", "when another head has overtaken it"])
async def test_a_call_that_loses_its_replicas_before_it_is_made_is_refused_and_changes_nothing(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It was said to have succeeded: this head alone listed the adapter, and no engine had it."""
    head = heads[0]

    async def lose_all() -> None:
        for replica_id in head.links:
            head.lose(replica_id)
        await eventually(lambda: head.orchestrator.stage_calls[0].members == [], "the losses")

    if lost == "while it waits for the document":
        monkeypatch.setattr(head.fleet_calls.session, "wait_synced", lose_all)
        reply = head.ask("add_lora", STORY)
    else:
        reply = head.ask_unanswered("add_lora", STORY)
        await eventually(lambda: all(link.calls for link in head.links.values()), "the call")
        calls = {link: link.calls[-1][0] for link in head.links.values()}
        await heads[1].call("set_weight_version", "v")
        for link, call_id in calls.items():
            link.answer(call_id)
        await lose_all()
    with pytest.raises(NoReplicaError, match="No replica can take the call add_lora right now"):
        await asyncio.wrap_future(reply)
    assert [stage.adapters for each in heads for stage in each.fleet_calls.state.stages if stage.adapters] == []
