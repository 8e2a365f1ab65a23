"""How operator calls end: slow heads, what is left of them, and aborts."""

import asyncio
import gc

import pytest

from tests.fakes.conditions import eventually
from tests.orchestrator.head_bus import FakeHead, HeadBus
from vllm_omni_plugin.coordinator.protocol.call_effects import ABORT_CLIENT_REQUESTS
from vllm_omni_plugin.errors import CoordinatorUnavailableError
from vllm_omni_plugin.orchestrator.fleet_state import call_session
from vllm_omni_plugin.orchestrator.fleet_state.call_session import SentCall
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCall


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
    assert warned == ["Not all other heads have followed the call set_weight_version."]


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
