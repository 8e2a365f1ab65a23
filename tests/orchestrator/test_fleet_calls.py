"""Operator calls through one head hold for all heads; how they end: slow heads, what is left of them, aborts."""

import asyncio
import gc
from functools import partial
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.engine_model import EngineModel
from tests.fakes.links import FakeLink, answer_calls, refuse_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_membership import Keeper
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.call_effects import ABORT_CLIENT_REQUESTS, FORGET_LORA
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, StageState
from vllm_omni_plugin.coordinator.protocol.head_messages import CallRefused, RelayedCall
from vllm_omni_plugin.errors import NOT_ALLOWED, CoordinatorUnavailableError, ReplicaError
from vllm_omni_plugin.orchestrator.fleet_state import call_session
from vllm_omni_plugin.orchestrator.fleet_state.call_session import SentCall
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.pool.pool_member import WEIGHTS_CORDON
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCall
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

STORY = Adapter("story", 7, "/loras/story")
OTHER = Adapter("other", 8, "/loras/other")
PAUSED = [("pause_scheduler", ("keep", False))]


async def test_a_head_without_a_coordinator_continues_without_the_fleets_state(
    bus: HeadBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_session, "FIRST_STATE_TIMEOUT_S", 0.01)
    async with FakeHead(bus, "a") as head:
        await head.fleet_calls.session.wait_synced()
        with pytest.raises(CoordinatorUnavailableError, match="cannot be reached"):
            await head.call("pause_scheduler", "keep", True)
        await head.join_fleet()
        await head.call("pause_scheduler", "keep", True)
        await FleetCalls(head.orchestrator).session.wait_synced()


async def test_calls_through_two_heads_at_once_both_hold(heads: list[FakeHead]) -> None:
    calls = [("add_lora", STORY), ("add_lora", OTHER), ("set_weight_version", "v")]
    await asyncio.gather(*(head.call(*call) for head, call in zip(heads, calls, strict=True)))
    states = [head.fleet_calls.state for head in heads]
    assert states[0] == states[1] == states[2]
    assert set(states[0].stages[0].adapters) == {STORY, OTHER}
    assert ("set_weight_version", ("v",)) in heads[0].replay
    assert [head.adapters for head in heads] == [{"other": OTHER}, {"story": STORY}, {"story": STORY, "other": OTHER}]


async def test_of_two_calls_at_once_that_contradict_each_other_the_later_holds_for_all_engines(
    heads: list[FakeHead],
) -> None:
    engines = [EngineModel(), EngineModel()]
    for order, head in enumerate(heads):
        for replica_id, link in head.links.items():
            # The engines get the calls in different orders.
            late = (order + replica_id) % 2 == 1
            link.on_call = partial(answer_late if late else answer_at_once, engines[replica_id])
    replies = [heads[0].ask("pause_scheduler", "keep", True), heads[1].ask("resume_scheduler")]
    await asyncio.gather(*map(asyncio.wrap_future, replies))
    paused = bool(heads[0].replay)
    assert [head.replay for head in heads] == [PAUSED if paused else []] * 3
    assert [engine.pause is not None for engine in engines] == [paused, paused]


def answer_at_once(engine: EngineModel, link: FakeLink, call_id: int, method: str, args: Any) -> None:
    engine.apply(method, args)
    link.answer(call_id, method)


def answer_late(engine: EngineModel, *call: Any) -> None:
    asyncio.get_running_loop().call_later(0.01, answer_at_once, engine, *call)


async def test_a_call_that_another_head_overtakes_again_and_again_ends_and_leaves_nothing(
    heads: list[FakeHead],
) -> None:
    engine, link = EngineModel(), heads[0].links[0]
    versions: list[str] = []
    halted: set[bool] = set()

    async def overtake(*call: Any) -> None:
        versions.append(f"v{len(versions)}")
        await heads[1].call("set_weight_version", versions[-1])
        answer_at_once(engine, link, *call)

    tasks = []

    def answer(_: FakeLink, call_id: int, method: str, args: Any) -> None:
        if method == "sleep":
            tasks.append(asyncio.create_task(overtake(call_id, method, args)))
        else:
            halted.add(heads[0].orchestrator.stage_calls[0].is_halted())
            answer_at_once(engine, link, call_id, method, args)

    link.on_call = answer
    with pytest.raises(CoordinatorUnavailableError, match="256 times during this call of sleep, which is not"):
        await heads[0].call("sleep", 1, "abort")
    await asyncio.gather(*tasks)
    assert (len(versions), engine.asleep, engine.pause) == (256, set(), None)
    assert halted == {True}, "an engine that wakes up has not stalled"
    assert [head.replay for head in heads] == [[("set_weight_version", (versions[-1],))]] * 3


@pytest.mark.parametrize(
    "call",
    [
        ("is_sleeping",),
        ("list_loras",),
        ("get_supported_tasks",),
        ("collective_rpc", "release_late_interaction_query_cache", None, [["q"]], {}),
    ],
    ids=str,
)
async def test_queries_are_not_sent_to_other_heads(bus: HeadBus, heads: list[FakeHead], call: tuple[Any, ...]) -> None:
    await heads[0].call(*call)
    assert bus.calls == []


async def test_other_heads_know_of_a_weight_update_whose_arguments_cannot_be_sent(
    heads: list[FakeHead], caplog: pytest.LogCaptureFixture
) -> None:
    private = heads[1].attach(5, private=True)
    await heads[0].call("collective_rpc", "update_weights", None, ["x" * 200_000], {})
    assert (
        "The call collective_rpc is not sent to other heads: its arguments must be plain JSON of at most 128 KiB."
        in caplog.text
    )
    assert private.calls == []
    assert heads[1].pool.member(5).cordons == {WEIGHTS_CORDON}


async def test_a_call_that_all_engines_refuse_leaves_no_record_anywhere(heads: list[FakeHead]) -> None:
    heads[0].answer_with(refuse_calls)
    with pytest.raises(ReplicaError, match="refuses sleep"):
        await heads[0].call("sleep", 1, "abort")
    with pytest.raises(ReplicaError):
        await heads[0].call("add_lora", STORY)
    assert [head.replay for head in heads] == [[]] * 3
    assert [head.adapters for head in heads] == [{}] * 3
    assert [head.statuses for head in heads] == [[ReplicaStatus.UP] * 2] * 3


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


async def test_a_replica_that_attaches_during_a_call_is_told_before_the_call_returns(heads: list[FakeHead]) -> None:
    reply = heads[0].ask_unanswered("set_weight_version", "v2")
    await eventually(lambda: heads[0].links[1].calls)
    links = [FakeLink("replica-2"), FakeLink("replica-3")]
    for replica_id, (head, link) in enumerate(zip(heads, links, strict=False), 2):
        link.on_call = answer_calls
        assert await head.bring_up(replica_id, link=link) == []
    links[1].on_call = None
    heads[0].answer_last()
    await eventually(lambda: links[1].calls)
    assert not reply.done()
    links[1].answer(links[1].calls[0][0])
    await asyncio.wrap_future(reply)
    assert [link.calls[0][1:] for link in links] == [("set_weight_version", ["v2"])] * 2


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


async def test_another_head_calls_its_private_replica_before_the_call_returns(heads: list[FakeHead]) -> None:
    private = heads[1].attach(5, private=True)
    private.on_call = None
    reply = heads[0].ask("sleep", 1, "wait")
    await eventually(lambda: heads[2].sleep_level == 1 and private.calls)
    assert not reply.done()
    assert heads[1].calls(0) == []
    private.answer(private.calls[0][0])
    await asyncio.wait_for(asyncio.wrap_future(reply), 10)
    assert heads[1].statuses == [ReplicaStatus.UP] * 3


def forbid_calls(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
    """A server that does not let heads make any call."""
    link.refuse(call_id, f"{NOT_ALLOWED}{method}")


@pytest.mark.parametrize("refused", ["there", "there, by its server"])
async def test_a_private_replica_with_another_outcome_is_taken_out_unless_the_call_is_not_allowed_there(
    heads: list[FakeHead], refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    private = heads[1].attach(5, private=True)
    private.on_call = forbid_calls if "server" in refused else refuse_calls
    await heads[0].call("sleep", 1, "abort")
    status = ReplicaStatus.UP if "server" in refused else ReplicaStatus.ERROR
    assert heads[1].statuses == [ReplicaStatus.UP, ReplicaStatus.UP, status]
    assert ("Replica 0.5 is lost (it failed the call sleep" in caplog.text) == (status is ReplicaStatus.ERROR)


async def test_the_policies_of_all_heads_are_notified_of_a_cleared_cache(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(heads[2].pool, "cache_cleared", lambda member: cleared.append(member.replica_id))
    await heads[0].call("reset_prefix_cache", False, False)
    assert cleared == [0, 1]
    assert heads[2].calls(0) == []


async def test_a_call_that_cannot_be_sent_to_engines_leaves_no_record(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("no way to encode it")

    monkeypatch.setattr(FakeEngineApi, "encode_utility", fail)
    with pytest.raises(TypeError):
        await heads[0].call("set_weight_version", "v9")
    for head in heads:
        await head.until([])
        assert head.statuses == [ReplicaStatus.UP] * 2


@pytest.mark.parametrize("unload", [FORGET_LORA, "remove_lora"])
async def test_an_adapter_is_known_to_all_heads_when_the_call_returns(heads: list[FakeHead], unload: str) -> None:
    await heads[0].call("add_lora", STORY)
    await heads[0].call("pin_lora", 7)
    assert [head.adapters for head in heads[1:]] == [{"story": STORY}] * 2
    await heads[1].call(unload, 7)
    assert [head.adapters for head in (heads[0], heads[2])] == [{}] * 2
    assert [head.replay for head in heads] == [[]] * 3
    assert [len(head.calls(0)) for head in heads] == [2, 0 if unload == FORGET_LORA else 1, 0]


async def test_the_last_head_of_a_fleet_needs_no_coordinator(bus: HeadBus, heads: list[FakeHead]) -> None:
    for other in heads[1:]:
        bus.cut(other)
    # News of heads and calls come in order.
    await heads[0].call("set_weight_version", "v2")
    bus.cut(heads[0])
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2


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
    two_stages = FleetState(9, "x", (StageState(), StageState()))
    for message in (
        RelayedCall(1, "shutdown", [], [0], head_id="x"),
        RelayedCall(1, "add_lora", [["a", 0, ""]], [0], head_id="x"),
        RelayedCall(1, state=two_stages, head_id="x"),
        two_stages,
    ):
        heads[0].orchestrator.rpc_async_queue.put(message)
    assert await heads[0].call("is_sleeping") == ["is_sleeping"] * 2
    assert heads[0].replay == PAUSED
    assert caplog.text.count("a state of 2 stages: this head has 1") == 2
    assert "not an operator call: shutdown" in caplog.text


async def test_a_document_that_a_head_cannot_adopt_does_not_keep_it_trying_for_ever(
    bus: HeadBus, heads: list[FakeHead], caplog: pytest.LogCaptureFixture
) -> None:
    heads[1].send(FleetState(9, "x", (StageState(), StageState())))
    await eventually(lambda: "a state of 2 stages" in caplog.text)
    with pytest.raises(CoordinatorUnavailableError, match="cannot adopt"):
        await heads[0].call("set_weight_version", "v")


@pytest.mark.parametrize("when", ["at once", "while others follow"])
async def test_closing_answers_an_operator_whose_action_other_heads_have_not_followed(
    bus: HeadBus, heads: list[FakeHead], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    bus.delayed.add("b")
    managing = asyncio.create_task(heads[0].manage("drain", 1))
    await eventually(lambda: heads[0 if when == "at once" else 2].pool.member(1).cordons)
    heads[0].orchestrator.close_queues()
    with pytest.raises(asyncio.CancelledError):
        await managing
    assert caplog.records == []


async def test_a_call_that_another_head_is_slow_to_follow_returns_with_one_warning(
    bus: HeadBus, heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bus.delayed.add("b")
    with monkeypatch.context() as patch:
        patch.setattr(call_session, "ANSWER_TIMEOUT_S", 0.01)
        assert len(await heads[0].call("set_weight_version", "v2")) == 2
    bus.deliver_delayed()
    await heads[0].call("resume_scheduler")
    assert heads[1].replay == [("set_weight_version", ("v2",))]
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["Not all other heads have confirmed the call set_weight_version in 0.01 s: see their logs."]


async def test_calls_leave_no_objects_behind(heads: list[FakeHead]) -> None:
    before = kept()
    await heads[0].call("set_weight_version", "v2")
    await heads[0].manage("drain", 1)
    await eventually(lambda: kept() <= before, "the freeing of what it held")


def kept() -> int:
    """Calls and their tasks that anything still holds."""
    gc.collect()
    every = gc.get_objects()
    tasks = [each for each in every if type(each) is asyncio.Task and each.get_name() == "omni-fleet-calls"]
    return len(tasks) + sum(type(each) in (StageCall, SentCall) for each in every)


@pytest.mark.parametrize("ids", [["a", "b"], []], ids=["by ids", "all"])
async def test_an_abort_reaches_the_requests_of_all_other_heads_and_no_engine(
    heads: list[FakeHead], ids: list[str]
) -> None:
    assert await heads[1].call(ABORT_CLIENT_REQUESTS, ids) == []
    assert [head.aborted for head in heads] == [[ids], [], [ids]]
    assert [head.calls(0) for head in heads] == [[]] * 3
    assert [head.replay for head in heads] == [[]] * 3


async def test_an_abort_is_an_error_while_other_heads_cannot_be_notified(bus: HeadBus, heads: list[FakeHead]) -> None:
    bus.cut(heads[0])
    with pytest.raises(CoordinatorUnavailableError):
        await heads[0].call(ABORT_CLIENT_REQUESTS, ["a"])
