"""What an administrator tells one head holds for all heads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.links import FakeLink, answer_calls, refuse_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus, Seat
from vllm_omni_plugin.coordinator import PeerCall, ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError, ReplicaError
from vllm_omni_plugin.orchestrator.engine_calls import FORGET_LORA
from vllm_omni_plugin.orchestrator.membership import ADMIN_HOLD
from vllm_omni_plugin.orchestrator.messages import PeerCalled, PeersLost, SeatTaken
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.work_exchange import WorkExchange
from vllm_omni_plugin.replicas.stage_client import StageClient
from vllm_omni_plugin.vllm_api.adapter import Adapter

STORY = Adapter("story", 7, "/loras/story")
PAUSED = [("pause_scheduler", ("keep", False))]


@pytest.fixture
async def heads(bus: HeadBus) -> AsyncIterator[list[FakeHead]]:
    async with AsyncExitStack() as stack:
        yield [await seated(stack, bus, head_id) for head_id in "abc"]


async def seated(stack: AsyncExitStack, bus: HeadBus, head_id: str, replicas: int = 2) -> FakeHead:
    head = await stack.enter_async_context(FakeHead(bus, head_id, replicas))
    await head.take_seat()
    return head


async def bring_up(head: FakeHead, replica_id: int) -> list[tuple[str, list[Any]]]:
    """A replica attaches; returns what it is told before it serves."""
    link = FakeLink(f"replica-{replica_id}")
    link.on_call = answer_calls
    await bring_up_over(head, replica_id, link)
    return [(method, args) for _, method, args in link.calls]


async def bring_up_over(head: FakeHead, replica_id: int, link: FakeLink) -> None:
    member = head.pool.add(replica_id)
    member.remote, member.input_addr, member.output_addr = True, link.input_addr, link.output_addr
    client = StageClient(link, FakeEngineApi(), replica_id, lambda outputs: None, lambda reason: None)
    client.start()
    async with asyncio.timeout(10):
        await head.orchestrator.admit(member, client, b"")
    head.pool.serve(member, client, link.input_addr, link.output_addr)


def statuses(head: FakeHead) -> list[ReplicaStatus]:
    return [member.status for member in head.pool.members]


async def test_a_call_reaches_every_engine_once_and_every_head_records_it(heads: list[FakeHead]) -> None:
    first, *others = heads
    assert await first.call("pause_scheduler", "keep", True) == ["pause_scheduler"] * 2
    for replica_id in (0, 1):
        assert first.calls(replica_id) == [("pause_scheduler", ["keep", True])]
        assert [head.calls(replica_id) for head in others] == [[], []]
    assert [head.replay for head in heads] == [PAUSED] * 3
    assert await bring_up(others[0], 2) == [("pause_scheduler", ["keep", False])]


async def test_calls_through_different_heads_one_after_the_other_hold_in_that_order(heads: list[FakeHead]) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    await heads[1].call("set_weight_version", "v2")
    await heads[2].call("resume_scheduler")
    assert [head.replay for head in heads] == [[("set_weight_version", ("v2",))]] * 3


async def test_heads_that_are_told_different_things_at_once_agree_on_one(heads: list[FakeHead]) -> None:
    replies = [head.send("set_weight_version", head.head_id) for head in heads]
    await asyncio.gather(*map(asyncio.wrap_future, replies))
    await eventually(lambda: heads[0].replay == heads[1].replay == heads[2].replay)


@pytest.mark.parametrize("method", ["is_sleeping", "list_loras", "get_supported_tasks"])
async def test_questions_concern_no_other_head(bus: HeadBus, heads: list[FakeHead], method: str) -> None:
    said = len(bus.sent)
    await heads[0].call(method)
    assert len(bus.sent) == said


async def test_a_call_that_belongs_to_one_request_concerns_no_other_head(bus: HeadBus, heads: list[FakeHead]) -> None:
    said = len(bus.sent)
    await heads[0].call("collective_rpc", "release_late_interaction_query_cache", None, [["q"]], {})
    assert len(bus.sent) == said


async def test_a_call_that_all_engines_refuse_leaves_no_record_anywhere(heads: list[FakeHead]) -> None:
    for link in heads[0].links.values():
        link.on_call = refuse_calls
    with pytest.raises(ReplicaError, match="refuses sleep"):
        await heads[0].call("sleep", 1, "abort")
    assert [head.replay for head in heads] == [[]] * 3
    assert [statuses(head) for head in heads] == [[ReplicaStatus.UP] * 2] * 3


async def test_a_call_without_replicas_is_an_error_that_no_other_head_hears_of(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    for replica_id in (0, 1):
        heads[0].lose(replica_id)
    said = len(bus.sent)
    with pytest.raises(NoReplicaError):
        await heads[0].call("sleep", 1, "abort")
    assert len(bus.sent) == said


async def test_a_replica_that_fails_what_others_took_is_taken_out_by_every_head(heads: list[FakeHead]) -> None:
    heads[0].links[1].on_call = refuse_calls
    assert await heads[0].call("sleep", 1, "abort") == ["sleep"]
    assert [statuses(head) for head in heads] == [[ReplicaStatus.UP, ReplicaStatus.ERROR]] * 3


async def test_a_replica_that_attaches_to_another_head_during_a_call_is_told(heads: list[FakeHead]) -> None:
    for link in heads[0].links.values():
        link.on_call = None
    reply = heads[0].send("set_weight_version", "v2")
    await heads[1].until([("set_weight_version", ("v2",))])
    assert await bring_up(heads[1], 2) == [("set_weight_version", ["v2"])]
    for link in heads[0].links.values():
        link.answer(link.calls[-1][0])
    await asyncio.wrap_future(reply)


async def test_a_call_made_elsewhere_while_a_replica_attaches_reaches_it_after_its_replay(
    heads: list[FakeHead],
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    link = FakeLink("replica-2")
    attaching = asyncio.create_task(bring_up_over(heads[1], 2, link))
    await eventually(lambda: link.calls)
    await heads[0].call("resume_scheduler")
    link.on_call = answer_calls
    link.answer(link.calls[0][0])
    await attaching
    assert [method for _, method, _ in link.calls] == ["pause_scheduler", "resume_scheduler"]


async def test_a_replica_that_only_another_head_reaches_is_told_by_that_one(heads: list[FakeHead]) -> None:
    private = heads[1].attach(5, private=True)
    await heads[0].call("pause_scheduler", "keep", True)
    assert [method for _, method, _ in private.calls] == ["pause_scheduler"]
    assert heads[1].calls(0) == []


@pytest.mark.parametrize("refused", ["there", "here"])
async def test_a_replica_that_did_otherwise_than_those_of_the_caller_is_taken_out(
    heads: list[FakeHead], refused: str
) -> None:
    private = heads[1].attach(5, private=True)
    for link in [private] if refused == "there" else heads[0].links.values():
        link.on_call = refuse_calls
    answer = asyncio.ensure_future(heads[0].call("sleep", 1, "abort"))
    await asyncio.wait([answer])
    assert (answer.exception() is None) == (refused == "there")
    assert statuses(heads[1]) == [ReplicaStatus.UP, ReplicaStatus.UP, ReplicaStatus.ERROR]


async def test_a_call_returns_when_the_replicas_of_other_heads_have_taken_it(heads: list[FakeHead]) -> None:
    private = heads[1].attach(5, private=True)
    private.on_call = None
    reply = heads[0].send("pause_scheduler", "wait", True)
    await eventually(lambda: private.calls)
    await eventually(lambda: len(heads[0].links[0].calls) == 1)
    assert not reply.done()
    private.answer(private.calls[0][0])
    await asyncio.wrap_future(reply)


async def test_the_policies_of_all_heads_hear_that_a_cache_was_cleared(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(heads[2].pool, "cache_cleared", lambda member: cleared.append(member.replica_id))
    await heads[0].call("reset_prefix_cache", False, False)
    await eventually(lambda: cleared == [0, 1])
    assert heads[2].calls(0) == []


async def test_a_call_that_no_engine_would_take_is_not_told_to_others(bus: HeadBus, heads: list[FakeHead]) -> None:
    said = len(bus.sent)
    with pytest.raises(TypeError):
        await heads[0].call("set_weight_version", object())
    await heads[0].call("pause_scheduler", "nonsense", True)
    assert len(bus.sent) == said


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


async def test_an_adapter_is_known_to_all_heads_when_the_call_returns(heads: list[FakeHead]) -> None:
    await heads[0].call("add_lora", STORY)
    assert [head.adapters for head in heads[1:]] == [{"story": STORY}] * 2
    await heads[1].call(FORGET_LORA, 7)
    assert [head.adapters for head in (heads[0], heads[2])] == [{}] * 2
    assert [head.replay for head in heads] == [[]] * 3
    assert [len(head.calls(0)) for head in heads] == [1, 0, 0]


async def test_an_adapter_that_no_engine_can_load_is_known_to_nobody(heads: list[FakeHead]) -> None:
    for link in heads[0].links.values():
        link.on_call = refuse_calls
    with pytest.raises(ReplicaError):
        await heads[0].call("add_lora", STORY)
    assert [head.adapters for head in heads] == [{}] * 3


async def test_the_servers_of_all_heads_hear_how_deep_the_engines_sleep(heads: list[FakeHead]) -> None:
    await heads[0].call("sleep", 2, "abort")
    assert [head.sleep_level for head in heads[1:]] == [2, 2]
    await heads[1].call("wake_up", ["weights"])
    await heads[2].call("wake_up", ["kv_cache"])
    assert heads[1].sleep_level == 0


async def test_an_adapter_is_forgotten_where_no_replica_is() -> None:
    async with FakeHead(HeadBus(), "a", replicas=0) as head:
        assert await head.call(FORGET_LORA, 7) == []


async def test_a_drained_replica_is_held_back_by_all_heads_until_any_resumes_it(heads: list[FakeHead]) -> None:
    await heads[0].manage("drain", 1)
    assert [head.pool.member(1).held_back for head in heads] == [{ADMIN_HOLD}] * 3
    await heads[2].manage("resume", 1)
    assert [head.pool.member(1).held_back for head in heads] == [frozenset()] * 3
    assert [head.orchestrator.drained for head in heads] == [set()] * 3


async def test_a_replica_drained_where_it_is_not_attached_yet_is_known_there(heads: list[FakeHead]) -> None:
    heads[0].attach(4)
    await heads[0].manage("drain", 4)
    member = heads[0].pool.member(4)
    assert heads[1].orchestrator.drained == {(0, member.input_addr, member.output_addr)}


async def test_a_private_replica_is_drained_by_its_own_head_only(bus: HeadBus, heads: list[FakeHead]) -> None:
    heads[0].attach(4, private=True)
    said = len(bus.sent)
    await heads[0].manage("drain", 4)
    assert (len(bus.sent), heads[0].orchestrator.drained) == (said, set())


class Keeper:
    """Notes whom it lets go."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.left: list[int] = []
        self._fault = fault

    def leave(self, member: Any) -> None:
        if self._fault is not None:
            raise self._fault
        self.left.append(member.replica_id)


async def test_a_replica_told_to_leave_is_let_go_by_all_heads_attached_to_it(heads: list[FakeHead]) -> None:
    keepers = [Keeper(), Keeper(ReplicaError("not attached")), Keeper()]
    for head, keeper in zip(heads, keepers, strict=True):
        head.orchestrator.remote_replicas = keeper  # type: ignore[assignment]
    await heads[0].manage("remove", 1)
    assert [keeper.left for keeper in keepers] == [[1], [], [1]]


async def test_closing_leaves_nothing_behind(bus: HeadBus) -> None:
    async with FakeHead(bus, "a") as head, FakeHead(bus, "b") as other:
        await head.take_seat()
        await other.take_seat()
        bus.deaf.add("b")
        await head.call("pause_scheduler", "keep", True)
        head.send("resume_scheduler")
    await eventually(lambda: [t for t in asyncio.all_tasks() if t.get_name().startswith("omni")] == [])


async def test_what_heads_say_reaches_them_through_the_orchestrators_queue(bus: HeadBus) -> None:
    async with FakeHead(bus, "a") as head, FakeHead(bus, "b") as other:
        await head.take_seat()
        orchestrator = other.orchestrator
        orchestrator.exchange = WorkExchange([other.pool], lambda work, full: None)
        seat = other.seat = bus.seats["b"] = Seat(bus, "b")
        seat.peers = ByQueue(orchestrator)  # type: ignore[assignment]
        await head.call("pause_scheduler", "keep", True)
        assert other.replay == PAUSED
        await head.manage("drain", 0)
        orchestrator.rpc_async_queue.force_put(PeersLost(None))
        await head.call("resume_scheduler")
        orchestrator.rpc_async_queue.force_put(SeatTaken())
        await other.until([])
        assert other.pool.member(0).held_back == {ADMIN_HOLD}


class ByQueue:
    """Hands everything to an orchestrator as its seat's listener does."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._queue = orchestrator.rpc_async_queue

    def called(self, call: PeerCall) -> None:
        self._queue.force_put(PeerCalled(call))

    def peers_lost(self, head_ids: tuple[str, ...]) -> None:
        self._queue.force_put(PeersLost(head_ids))
