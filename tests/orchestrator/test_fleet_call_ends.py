"""How operator calls end: what is left of them, the updates to servers, and the log."""

import asyncio
import gc
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.links import refuse_calls
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_fleet_calls import STORY, forbid_calls
from vllm_omni_plugin.coordinator.protocol.call_arguments import ABORT_CLIENT_REQUESTS
from vllm_omni_plugin.errors import CoordinatorUnavailableError, ReplicaError
from vllm_omni_plugin.orchestrator.fleet_state import fleet_calls
from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import OngoingCall
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter

OTHER_STORY = Adapter("story", 7, "/loras/other")
V2 = [("set_weight_version", ("v2",))]


async def test_a_call_that_another_head_is_slow_to_follow_returns_with_one_warning(
    bus: HeadBus, heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bus.delayed.add("b")
    with monkeypatch.context() as patch:
        patch.setattr(fleet_calls, "FOLLOW_TIMEOUT_S", 0.01)
        assert len(await heads[0].call("set_weight_version", "v2")) == 2
    bus.deliver_delayed()
    # Heads follow in order: when this call returns, all have followed the other one, and its caller knows.
    await heads[0].call("resume_scheduler")
    assert heads[1].replay == V2
    assert [record.getMessage() for record in caplog.records] == [
        "Not all other heads have followed the call set_weight_version."
    ]


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
    return len(tasks) + sum(type(each) is OngoingCall for each in every)


async def test_the_servers_of_other_heads_keep_an_adapter_whose_replacement_is_refused(heads: list[FakeHead]) -> None:
    await heads[0].call("add_lora", STORY)
    heads[0].answer_with(refuse_calls)
    with pytest.raises(ReplicaError, match="refuses add_lora"):
        await heads[0].call("add_lora", OTHER_STORY)
    assert [head.adapters for head in heads[1:]] == [{"story": STORY}] * 2


@pytest.mark.parametrize("ends", ["refused", "taken, and only its snapshot had it"])
async def test_a_taken_over_call_does_not_end_the_heads_own_call(
    bus: HeadBus, heads: list[FakeHead], ends: str
) -> None:
    lost, taker, other = heads
    await lost.call("add_lora", STORY)
    lost.ask_unanswered("add_lora", OTHER_STORY)
    await taker.until([("add_lora", (OTHER_STORY,))])
    if ends != "refused":
        await taker.join_fleet()
    own = taker.ask_unanswered("set_weight_version", "v2")
    await eventually(lambda: taker.links[1].calls)
    bus.cut(lost)
    await eventually(lambda: len(taker.links[1].calls) == 2)
    for link in taker.links.values():
        (link.refuse if ends == "refused" else link.answer)(link.calls[1][0])
    story = STORY if ends == "refused" else OTHER_STORY
    await eventually(lambda: other.replay[0] == ("add_lora", (story,)) and other.adapters == {"story": story})
    # News of calls come in order.
    await other.call("pin_lora", 7)
    for link in taker.links.values():
        link.answer(link.calls[0][0])
    assert len(await asyncio.wrap_future(own)) == 2
    assert taker.adapters == {"story": story}


async def test_a_taken_over_call_notifies_the_server_even_if_one_node_does_not_allow_it(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    heads[0].ask_unanswered("add_lora", STORY)
    await heads[1].until([("add_lora", (STORY,))])
    heads[1].links[1].on_call = forbid_calls
    bus.cut(heads[0])
    for head in heads[1:]:
        await eventually(lambda head=head: head.adapters == {"story": STORY})  # type: ignore[misc]


async def test_losing_the_coordinator_notifies_the_server_of_an_adapter_being_loaded_by_another_head(
    bus: HeadBus, heads: list[FakeHead]
) -> None:
    heads[0].ask_unanswered("add_lora", STORY)
    await heads[1].until([("add_lora", (STORY,))])
    bus.cut(heads[1])
    await eventually(lambda: heads[1].adapters == {"story": STORY}, "until it knows better")


async def test_a_call_that_cannot_be_repeated_is_logged(
    bus: HeadBus, heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("no way to encode it")

    heads[0].ask_unanswered("set_weight_version", "v2")
    await heads[1].until(V2)
    monkeypatch.setattr(FakeEngineApi, "encode_utility", fail)
    bus.cut(heads[0])
    await eventually(lambda: "A call of another head could not be followed" in caplog.text, "a line in the log")


async def test_a_head_that_closes_during_a_call_logs_no_error(bus: HeadBus, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeHead(bus, "a") as other:
        await other.join_fleet()
        async with FakeHead(bus, "b") as head:
            await head.join_fleet()
            head.ask_unanswered("set_weight_version", "v2")
            await eventually(lambda: head.links[1].calls)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


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
