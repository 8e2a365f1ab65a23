"""What heads say that is no valid call or record is answered with an error and changes nothing."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_peer_calls import PAUSED, seated
from vllm_omni_plugin.coordinator import PeerAnswer, PeerCall
from vllm_omni_plugin.orchestrator.foreign_calls import ForeignCalls


@pytest.fixture
async def heads(stack: AsyncExitStack, bus: HeadBus) -> list[FakeHead]:
    return [await seated(stack, bus, head_id) for head_id in "ab"]


VALID: dict[str, Any] = {
    "call": 1,
    "after": [0, ""],
    "method": "pause_scheduler",
    "arguments": ["keep", True],
    "stages": [0],
    "told": [],
}
HOSTILE: dict[str, tuple[str, Any]] = {
    "an unknown call": ("shutdown", None),
    "no arguments": ("engine-call", None),
    "a list": ("engine-call", [1, 2]),
    "an unknown field": ("engine-call", VALID | {"more": 1}),
    "a method that is none of these": ("engine-call", VALID | {"method": "shutdown"}),
    "a question": ("engine-call", VALID | {"method": "is_sleeping", "arguments": []}),
    "too few arguments": ("engine-call", VALID | {"arguments": ["keep"]}),
    "an unknown mode": ("engine-call", VALID | {"arguments": ["kill", True]}),
    "a stage that is not there": ("engine-call", VALID | {"stages": [1]}),
    "a negative stage": ("engine-call", VALID | {"stages": [-1]}),
    "a negative version": ("engine-call", VALID | {"after": [-1, ""]}),
    "an adapter without a path": ("engine-call", VALID | {"method": "add_lora", "arguments": [["a", 1, ""]]}),
    "an adapter of id 0": ("engine-call", VALID | {"method": "add_lora", "arguments": [["a", 0, "p"]]}),
    "an adapter with more fields": (
        "engine-call",
        VALID | {"method": "add_lora", "arguments": [["a", 1, "p", None, False, False, "", 1]]},
    ),
    "an end without its call": ("engine-call-over", {"after": [1, "a"], "taken": [True]}),
    "a replica without an address": ("manage", {"after": [0, ""], "action": "drain", "replica": [0, "", "x"]}),
    "an unknown action": ("manage", {"after": [0, ""], "action": "kill", "replica": [0, "a", "b"]}),
    "a question with arguments": ("state", {"all": True}),
    "a version that is none": ("version", {"stamp": ["1", "x"], "under_way": []}),
}


@pytest.mark.parametrize(("method", "arguments"), HOSTILE.values(), ids=HOSTILE)
async def test_a_bad_call_is_answered_with_an_error_and_changes_nothing(
    bus: HeadBus, heads: list[FakeHead], method: str, arguments: Any
) -> None:
    assert heads[0].seat is not None
    (answer,) = await asyncio.wrap_future(heads[0].seat.call(method, arguments, 3.0))
    assert answer.error
    assert heads[1].replay == []
    assert heads[1].calls(0) == []
    assert heads[1].orchestrator.drained == set()
    assert len(await heads[0].call("pause_scheduler", "keep", True)) == 2
    assert heads[1].replay == PAUSED


async def test_a_call_that_this_head_fails_to_deal_with_is_answered_with_an_error(
    heads: list[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise KeyError("gone")

    assert heads[0].seat is not None
    monkeypatch.setattr(ForeignCalls, "begin", fail)
    (answer,) = await asyncio.wrap_future(heads[0].seat.call("engine-call", VALID, 3.0))
    assert "gone" in answer.error


async def test_the_end_of_a_call_that_speaks_of_other_stages_is_an_error(bus: HeadBus, heads: list[FakeHead]) -> None:
    assert heads[0].seat is not None
    for method, arguments in (
        ("engine-call", VALID),
        ("engine-call-over", {"call": 1, "after": [1, "a"], "taken": [True, False]}),
    ):
        (answer,) = await asyncio.wrap_future(heads[0].seat.call(method, arguments, 3.0))
    assert "a call of 1 stages speaks of 2" in answer.error


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"stamp": [9, "x"], "stages": [], "drained": [], "told": []},
        {
            "stamp": [9, "x"],
            "stages": [{"replay": [["shutdown", []]], "unreplayable": False}],
            "drained": [],
            "told": [],
        },
        {
            "stamp": [9, "x"],
            "stages": [{"replay": [["profile", [True, None, None, None]]], "unreplayable": False}],
            "drained": [],
            "told": [],
        },
        {"stamp": [9, "x"], "stages": [{"replay": [], "unreplayable": False}], "drained": [[0, "", ""]], "told": []},
    ],
)
async def test_a_record_that_is_none_is_not_adopted(
    bus: HeadBus, stack: AsyncExitStack, heads: list[FakeHead], record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await heads[0].call("pause_scheduler", "keep", True)
    seat = bus.seats["b"]

    def lie(call: PeerCall) -> None:
        bus.seats[call.head_id].answered(call, PeerAnswer("b", record))

    monkeypatch.setattr(seat, "arrive", lie)
    bus.deaf.add("a")
    late = await seated(stack, bus, "late", replicas=0)
    assert (late.replay, late.orchestrator.drained) == ([], set())
