"""Operator calls through one head hold for all heads."""

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.links import FakeLink, answer_calls, refuse_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_membership import Keeper
from vllm_omni_plugin.coordinator import ReplicaKey, ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA
from vllm_omni_plugin.coordinator.protocol.head_messages import CallRefused, FleetState, NumberedCall, StageState
from vllm_omni_plugin.errors import NOT_ALLOWED, CoordinatorUnavailableError, NoReplicaError, ReplicaError
from vllm_omni_plugin.orchestrator.fleet_state import fleet_calls
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter

STORY = Adapter("story", 7, "/loras/story")
PAUSED = [("pause_scheduler", ("keep", False))]


async def numbered_late(bus: HeadBus, heads: list[FakeHead]) -> "Future[list[Any]]":
    """The first head makes a call; the other heads have it, but the call's number has not reached the first one."""
    bus.delayed.add("a")
    reply = heads[0].ask("set_weight_version", "v2")
    await heads[1].until([("set_weight_version", ("v2",))])
    return reply


async def test_a_head_without_a_coordinator_continues_without_the_fleets_state(
    bus: HeadBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_calls, "FIRST_STATE_TIMEOUT_S", 0.01)
    async with FakeHead(bus, "a") as head:
        assert not await head.fleet_calls.wait_synced()
        with pytest.raises(CoordinatorUnavailableError, match="cannot be reached"):
            await head.call("pause_scheduler", "keep", True)
        await head.join_fleet()
        assert await head.fleet_calls.wait_synced()
        assert await fleet_calls.FleetCalls(head.orchestrator).wait_synced(), "a fleet that nothing can join"


async def test_a_call_reaches_every_engine_once_and_every_head_records_it(heads: list[FakeHead]) -> None:
    first, *others = heads
    assert await first.call("pause_scheduler", "keep", True) == ["pause_scheduler"] * 2
    for replica_id in (0, 1):
        assert first.calls(replica_id) == [("pause_scheduler", ["keep", True])]
        assert [head.calls(replica_id) for head in others] == [[], []]
    assert [head.replay for head in heads] == [PAUSED] * 3
    assert await others[0].bring_up(2) == [("pause_scheduler", ["keep", False])]


async def test_calls_through_different_heads_hold_in_one_order(heads: list[FakeHead]) -> None:
    await asyncio.gather(*(asyncio.wrap_future(head.ask("set_weight_version", head.head_id)) for head in heads))
    assert heads[0].replay == heads[1].replay == heads[2].replay != []
    await heads[1].call("set_weight_version", "last")
    assert [head.replay for head in heads] == [[("set_weight_version", ("last",))]] * 3


@pytest.mark.parametrize(
    "call",
    [
        ("is_sleeping",),
        ("list_loras",),
        ("get_supported_tasks",),
        ("collective_rpc", "release_late_interaction_query_cache", None, [["q"]], {}),
        ("pause_scheduler", "nonsense", True),
    ],
    ids=str,
)
async def test_calls_without_state_and_invalid_calls_are_not_sent_to_other_heads(
    bus: HeadBus, heads: list[FakeHead], call: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    await heads[0].call(*call)
    assert bus.calls == []
    warned = [record.getMessage() for record in caplog.records]
    assert warned == (["Other heads cannot be notified of this call of pause_scheduler."] if "nonsense" in call else [])


async def test_a_call_that_all_engines_refuse_leaves_no_record_anywhere(heads: list[FakeHead]) -> None:
    heads[0].answer_with(refuse_calls)
    with pytest.raises(ReplicaError, match="refuses sleep"):
        await heads[0].call("sleep", 1, "abort")
    with pytest.raises(ReplicaError):
        await heads[0].call("add_lora", STORY)
    assert [head.replay for head in heads] == [[]] * 3
    assert [head.adapters for head in heads] == [{}] * 3
    assert [head.statuses for head in heads] == [[ReplicaStatus.UP] * 2] * 3


async def test_a_call_without_replicas_is_an_error_and_is_not_sent_to_other_heads(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    for replica_id in (0, 1):
        heads[0].lose(replica_id)
    with pytest.raises(NoReplicaError):
        await heads[0].call("sleep", 1, "abort")
    assert bus.calls == []


async def test_a_call_that_the_coordinator_refuses_is_an_error(bus: HeadBus, heads: list[FakeHead]) -> None:
    bus.delayed.add("a")
    reply = heads[0].ask("set_weight_version", "v2")
    await eventually(lambda: bus.calls)
    heads[0].orchestrator.rpc_async_queue.put(CallRefused(bus.calls[0].call_id, "there are too many"))
    with pytest.raises(CoordinatorUnavailableError, match="there are too many"):
        await asyncio.wait_for(asyncio.wrap_future(reply), 10)


async def test_a_replica_that_fails_a_call_that_others_accepted_is_taken_out_by_every_head(
    heads: list[FakeHead], caplog: pytest.LogCaptureFixture
) -> None:
    heads[0].links[1].on_call = refuse_calls
    assert await heads[0].call("sleep", 1, "abort") == ["sleep"]
    assert caplog.text.count("is lost (it failed the call sleep, which other replicas accepted)") == 3
    assert [head.statuses for head in heads] == [[ReplicaStatus.UP, ReplicaStatus.ERROR]] * 3


async def test_a_replica_that_attaches_to_another_head_during_a_call_replays_it(heads: list[FakeHead]) -> None:
    reply = heads[0].ask_unanswered("set_weight_version", "v2")
    await heads[1].until([("set_weight_version", ("v2",))])
    assert await heads[1].bring_up(2) == [("set_weight_version", ["v2"])]
    heads[0].answer_last()
    await asyncio.wrap_future(reply)


async def test_a_replica_that_attaches_while_a_call_waits_for_its_number_is_called_once(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].call("set_weight_version", "v1")
    reply = await numbered_late(bus, heads)
    link = FakeLink("replica-2")
    link.on_call = answer_calls
    attaching = asyncio.create_task(heads[0].bring_up(2, link=link))
    await asyncio.wait([attaching], timeout=0.02)
    assert not attaching.done()
    bus.deliver_delayed()
    assert await attaching == [("set_weight_version", ["v1"]), ("set_weight_version", ["v2"])]
    assert len(await asyncio.wrap_future(reply)) == 2


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_replica_that_the_caller_loses_before_the_call_is_taken_out_by_the_others(
    bus: HeadBus, heads: list[FakeHead], refuses: bool
) -> None:
    reply = await numbered_late(bus, heads)
    heads[0].kill(1)
    if refuses:
        heads[0].links[0].on_call = refuse_calls
    bus.deliver_delayed()
    await asyncio.gather(asyncio.wrap_future(reply), return_exceptions=True)
    assert (reply.exception() is not None) is refuses
    status = ReplicaStatus.UP if refuses else ReplicaStatus.ERROR
    assert [head.statuses for head in heads[1:]] == [[ReplicaStatus.UP, status]] * 2


async def test_a_replica_that_the_caller_loses_before_the_call_and_attaches_again_during_it_is_taken_out(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    reply = await numbered_late(bus, heads)
    heads[0].kill(1)
    heads[0].stop_answering()
    bus.deliver_delayed()
    await eventually(lambda: heads[0].links[0].calls)
    # Its node takes it for synced, since other heads are still attached.
    heads[0].join(heads[0].pool.member(1))
    heads[0].links[0].answer(heads[0].links[0].calls[0][0])
    assert len(await asyncio.wrap_future(reply)) == 1
    assert [head.statuses for head in heads] == [[ReplicaStatus.UP, ReplicaStatus.ERROR]] * 3


async def test_a_weight_update_that_waits_for_its_number_is_not_repeated_on_an_attaching_replica(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    link = heads[1].attach(2)
    link.on_call = answer_calls
    bus.delayed.add("a")
    reply = heads[0].ask("collective_rpc", "update_weights", None, [], {})
    await eventually(lambda: link.calls)
    again = FakeLink("replica-2")
    again.on_call = answer_calls
    attaching = asyncio.create_task(heads[0].bring_up(2, synced=True, link=again))
    await asyncio.wait([attaching], timeout=0.02)
    bus.deliver_delayed()
    await asyncio.wrap_future(reply)
    with pytest.raises(ReplicaError, match="weights were updated"):
        await attaching
    assert (len(link.calls), again.calls) == (1, [])


async def test_a_call_made_elsewhere_while_a_replica_attaches_reaches_it_after_its_replay(
    heads: list[FakeHead],
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    link = FakeLink("replica-2")
    attaching = asyncio.create_task(heads[1].bring_up(2, link=link))
    await eventually(lambda: link.calls)
    await heads[0].call("resume_scheduler")
    link.on_call = answer_calls
    link.answer(link.calls[0][0])
    assert [method for method, _ in await attaching] == ["pause_scheduler", "resume_scheduler"]


async def test_another_head_calls_its_private_replica_before_the_call_returns(
    heads: list[FakeHead],
) -> None:
    private = heads[1].attach(5, private=True)
    private.on_call = None
    reply = heads[0].ask("sleep", 1, "wait")
    # The other heads know that the engines of the caller accepted the call.
    await eventually(lambda: heads[2].sleep_level == 1)
    assert not reply.done()
    assert heads[1].calls(0) == []
    private.answer(private.calls[0][0])
    await asyncio.wait_for(asyncio.wrap_future(reply), 10)
    assert heads[1].statuses == [ReplicaStatus.UP] * 3


def forbid_calls(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
    """A server that does not let heads make any call."""
    link.refuse(call_id, f"{NOT_ALLOWED}{method}")


@pytest.mark.parametrize("refused", ["there", "here", "there, by its server"])
async def test_a_private_replica_with_another_outcome_is_taken_out_unless_the_call_is_not_allowed_there(
    heads: list[FakeHead], refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    private = heads[1].attach(5, private=True)
    for link in heads[0].links.values() if refused == "here" else [private]:
        link.on_call = forbid_calls if "server" in refused else refuse_calls
    answer = asyncio.ensure_future(heads[0].call("sleep", 1, "abort"))
    await asyncio.wait([answer])
    assert (answer.exception() is None) == (refused != "here")
    status = ReplicaStatus.UP if "server" in refused else ReplicaStatus.ERROR
    assert heads[1].statuses == [ReplicaStatus.UP, ReplicaStatus.UP, status]
    reason = "accepted the call sleep, which other replicas refused" if refused == "here" else "failed the call sleep"
    assert (f"Replica 0.5 is lost (it {reason}" in caplog.text) == (status is ReplicaStatus.ERROR)


async def test_the_policies_of_all_heads_are_notified_of_a_cleared_cache(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(heads[2].pool, "cache_cleared", lambda member: cleared.append(member.replica_id))
    await heads[0].call("reset_prefix_cache", False, False)
    assert cleared == [0, 1]
    assert heads[2].calls(0) == []


async def test_a_call_that_cannot_be_sent_is_withdrawn_everywhere(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("no way to encode it")

    monkeypatch.setattr(FakeEngineApi, "encode_utility", fail)
    with pytest.raises(TypeError):
        await heads[0].call("set_weight_version", "v9")
    for head in heads:
        await head.until([])


@pytest.mark.parametrize("unload", [FORGET_LORA, "remove_lora"])
async def test_an_adapter_is_known_to_all_heads_when_the_call_returns(heads: list[FakeHead], unload: str) -> None:
    await heads[0].call("add_lora", STORY)
    await heads[0].call("pin_lora", 7)
    assert [head.adapters for head in heads[1:]] == [{"story": STORY}] * 2
    await heads[1].call(unload, 7)
    assert [head.adapters for head in (heads[0], heads[2])] == [{}] * 2
    assert [head.replay for head in heads] == [[]] * 3
    assert [len(head.calls(0)) for head in heads] == [2, 0 if unload == FORGET_LORA else 1, 0]


async def test_the_servers_of_all_heads_are_notified_of_the_sleep_level(heads: list[FakeHead]) -> None:
    await heads[0].call("sleep", 2, "abort")
    assert [head.sleep_level for head in heads[1:]] == [2, 2]
    await heads[1].call("wake_up", ["weights"])
    await heads[2].call("wake_up", ["kv_cache"])
    assert heads[1].sleep_level == 0


async def test_a_drained_replica_is_cordoned_by_all_heads_until_any_resumes_it(heads: list[FakeHead]) -> None:
    await heads[0].manage("drain", 1)
    assert [head.pool.member(1).cordons for head in heads] == [{ADMIN_CORDON}] * 3
    await heads[2].manage("resume", 1)
    assert [head.pool.member(1).cordons for head in heads] == [frozenset()] * 3
    assert [head.orchestrator.drained for head in heads] == [set()] * 3


async def test_the_last_head_of_a_fleet_needs_no_coordinator(bus: HeadBus, heads: list[FakeHead]) -> None:
    for other in heads[1:]:
        bus.cut(other)
    # News of heads and calls come in order.
    await heads[0].call("set_weight_version", "v2")
    bus.cut(heads[0])
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2


async def test_a_replica_that_is_resumed_while_a_head_is_cut_off_is_resumed_there_too(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    await heads[0].manage("drain", 1)
    bus.cut(heads[2])
    await heads[0].manage("resume", 1)
    await heads[2].join_fleet()
    await eventually(lambda: heads[2].pool.member(1).cordons == frozenset())
    assert heads[2].orchestrator.drained == set()


async def test_a_drain_is_recorded_by_heads_that_are_not_attached_to_the_replica(heads: list[FakeHead]) -> None:
    heads[0].attach(4)
    await heads[0].manage("drain", 4)
    member = heads[0].pool.member(4)
    assert heads[1].orchestrator.drained == {(0, member.input_addr, member.output_addr)}


async def test_a_private_replica_is_drained_by_its_own_head_only(bus: HeadBus, heads: list[FakeHead]) -> None:
    heads[0].attach(4, private=True)
    await heads[0].manage("drain", 4)
    assert (bus.calls, heads[0].orchestrator.drained) == ([], set())
    await heads[0].join_fleet()
    assert heads[0].pool.member(4).cordons == {ADMIN_CORDON}, "what others drained is no matter of it"


async def test_a_removed_replica_is_removed_by_all_heads_attached_to_it(heads: list[FakeHead]) -> None:
    keepers = [Keeper(), Keeper(ReplicaError("not attached")), Keeper()]
    for head, keeper in zip(heads, keepers, strict=True):
        for member in head.pool.members:
            member.leave = partial(keeper.leave, member)
    await heads[0].manage("remove", 1)
    assert [{member.replica_id for member in keeper.calls} for keeper in keepers] == [{1}] * 3


async def test_invalid_calls_and_states_are_logged_and_change_nothing(
    heads: list[FakeHead], caplog: pytest.LogCaptureFixture
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    for message in (
        NumberedCall(1, "shutdown", [], [0], [], number=90, head_id="x"),
        NumberedCall(1, "pause_scheduler", ["keep", True], [0, 1], [], number=91, head_id="x"),
        FleetState(92, [StageState(1, [], False)], []),
        FleetState(93, [StageState(0, [("profile", [True, None, None, None])], False)], []),
    ):
        heads[0].orchestrator.rpc_async_queue.put(message)
    assert await heads[0].call("is_sleeping") == ["is_sleeping"] * 2
    assert heads[0].replay == PAUSED
    assert "a call of stages [0, 1]: this head has 1" in caplog.text


@pytest.mark.parametrize("when", ["at once", "while others follow"])
async def test_closing_answers_an_operator_whose_action_other_heads_have_not_followed(
    bus: HeadBus, heads: list[FakeHead], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    bus.delayed.add("b")
    reply: Future[None] = Future()
    reply.set_running_or_notify_cancel()
    member = heads[0].pool.member(1)
    heads[0].fleet_calls.share_replica_action("drain", ReplicaKey(0, member.input_addr, member.output_addr), reply)
    if when == "while others follow":
        await eventually(lambda: heads[2].pool.member(1).cordons)
    await heads[0].fleet_calls.close()
    with pytest.raises(QueueClosedError, match="about to end"):
        reply.result(timeout=0)
    assert caplog.records == []


async def test_closing_leaves_nothing_behind(bus: HeadBus) -> None:
    async with FakeHead(bus, "a") as head, FakeHead(bus, "b") as other:
        await head.join_fleet()
        await other.join_fleet()
        bus.delayed.add("b")
        head.ask("pause_scheduler", "keep", True)
        await head.until(PAUSED)
        head.ask("resume_scheduler")
    await eventually(lambda: [t for t in asyncio.all_tasks() if t.get_name().startswith("omni")] == [])
