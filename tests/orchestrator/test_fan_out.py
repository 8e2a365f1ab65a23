"""Operator calls to every replica, and their replay to replicas that attach later."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes.adapter_files import write_adapter
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink, answer_calls, refuse_calls
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.call_effects import FORGET_LORA
from vllm_omni_plugin.errors import NOT_ALLOWED, NoReplicaError, NotAllowedError, ReplicaError
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_digest


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=3) as fleet:
        fleet.answer_with(answer_calls)
        yield fleet


async def until_called(*links: FakeLink) -> None:
    await eventually(lambda: all(link.calls for link in links), "the call")


@pytest.mark.parametrize(("on_call", "status"), [(refuse_calls, "error"), (lambda link, *_: link.say_dead(), "down")])
async def test_a_replica_that_fails_or_dies_during_a_call_is_taken_out_and_the_other_answers_returned(
    fleet: FakeFleet, on_call: Any, status: str
) -> None:
    fleet.links[1].on_call = on_call
    assert await fleet.call("add") == ["add", "add"]
    assert fleet.statuses == ["up", status, "up"]


async def test_a_call_that_one_node_does_not_allow_is_an_error_and_takes_no_replica_out(fleet: FakeFleet) -> None:
    fleet.links[1].on_call = lambda link, call_id, method, args: link.refuse(call_id, f"{NOT_ALLOWED}{method}")
    with pytest.raises(NotAllowedError, match="not allowed: sleep"):
        await fleet.call("sleep", 1, "abort")
    assert fleet.statuses == [ReplicaStatus.UP] * 3


async def test_a_replica_that_dies_in_the_step_in_which_a_call_begins_is_left_out_of_its_result(
    fleet: FakeFleet,
) -> None:
    stage = fleet.orchestrator.stage_calls[0]
    call = stage.begin("sleep", (1, "abort"))
    fleet.kill(1)
    await stage.send(call)
    assert call.results == ["sleep"] * 2
    assert [replica.member.replica_id for replica in call.failed] == [1]


@pytest.fixture
def story(tmp_path: Path) -> Adapter:
    """An adapter with files on this node."""
    folder = write_adapter(tmp_path / "story")
    return Adapter("story", 7, str(folder), digest=adapter_digest(str(folder)))


async def test_a_local_replica_does_not_load_other_adapter_files_than_the_calling_head(
    fleet: FakeFleet, story: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.pool.members[0].remote = True
    fleet.pool.members[2].remote = True
    # Another head may choose all of it.
    other = replace(story, lora_path="/\nforged line", digest="0a1b\nforged line")
    assert await fleet.call("add_lora", other) == ["add_lora"] * 2
    assert fleet.statuses == [ReplicaStatus.UP, ReplicaStatus.ERROR, ReplicaStatus.UP]
    assert "/ forged line have the digest" in caplog.text
    assert "\nforged" not in caplog.text


async def test_a_local_replica_cannot_join_after_the_files_of_an_adapter_changed(
    fleet: FakeFleet, story: Adapter
) -> None:
    await fleet.call("add_lora", story)
    assert [method for method, _ in await fleet.replayed()] == ["add_lora"]
    write_adapter(Path(story.lora_path), weights=b"other")
    with pytest.raises(ReplicaError, match=f"'story': the files at {story.lora_path} have the digest .*{story.digest}"):
        await fleet.replayed()
    await fleet.call(FORGET_LORA, 7)
    assert await fleet.replayed() == []


async def join(fleet: FakeFleet) -> tuple[FakeLink, asyncio.Task[list[Any]]]:
    """A replica joins, and does not answer the first call of its replay."""
    link = FakeLink("joiner")
    joining = asyncio.create_task(fleet.replayed(link=link))
    await until_called(link)
    return link, joining


def answer_all(link: FakeLink) -> None:
    link.on_call = answer_calls
    link.answer(link.calls[0][0])


@pytest.mark.parametrize(
    ("before", "during", "after_replay"),
    [
        (("sleep", 1, "abort"), ("wake_up", None), [("wake_up", [None])]),
        (("pause_scheduler", "keep"), ("resume_scheduler",), [("resume_scheduler", [])]),
        (("set_weight_version", "v1"), ("set_weight_version", "v2"), [("set_weight_version", ["v2"])]),
        (("add_lora", Adapter("story", 7, "/loras/story")), (FORGET_LORA, 7), []),
    ],
    ids=lambda case: str(case[0]) if case else "no call",
)
async def test_a_call_during_a_replay_reaches_the_joiner_after_it(
    fleet: FakeFleet, before: tuple[Any, ...], during: tuple[Any, ...], after_replay: list[Any]
) -> None:
    await fleet.call(*before)
    link, joining = await join(fleet)
    await fleet.call(*during)
    answer_all(link)
    assert (await joining)[1:] == after_replay


async def test_calls_through_one_head_hold_in_the_order_in_which_they_began(fleet: FakeFleet) -> None:
    fleet.answer_with(None)
    pausing = fleet.ask("pause_scheduler", "wait", True)
    await until_called(*fleet.links.values())
    fleet.answer_with(answer_calls)
    await fleet.call("resume_scheduler")
    for link in fleet.links.values():
        # Its last request has ended.
        link.answer(link.calls[0][0])
    await asyncio.wrap_future(pausing)
    assert await fleet.replayed() == []


async def test_a_joiner_that_refuses_its_replay_is_an_error(fleet: FakeFleet) -> None:
    await fleet.call("set_weight_version", "v2")
    link = FakeLink("joiner")
    link.on_call = refuse_calls
    with pytest.raises(ReplicaError, match="refuses set_weight_version"):
        await fleet.replayed(link=link)


async def test_a_cancelled_call_leaves_nothing_behind(fleet: FakeFleet) -> None:
    fleet.answer_with(None)
    reply = fleet.ask("one")
    await until_called(*fleet.links.values())
    reply.cancel()
    for link in fleet.links.values():
        link.answer(link.calls[0][0])
        link.on_call = answer_calls
    assert await fleet.call("two") == ["two"] * 3
    assert [repr(member.client).endswith("alive, 0 calls>") for member in fleet.pool.members] == [True] * 3
    assert [task for task in asyncio.all_tasks() if task.get_name() == "omni-call-one"] == []


async def test_closing_ends_calls_that_run_and_calls_that_wait() -> None:
    async with FakeFleet() as fleet:
        running = fleet.ask("one")
        await until_called(*fleet.links.values())
        waiting = fleet.ask("two")
    for reply in (running, waiting):
        with pytest.raises(CancelledError):
            reply.result(timeout=0)


async def test_closing_ends_a_call_that_was_dequeued_and_not_begun() -> None:
    async with FakeFleet() as fleet:
        reply = fleet.ask("one")
        queue = fleet.orchestrator.rpc_async_queue
        await eventually(lambda: len(queue) == 0, "the taking of the call")
    with pytest.raises(CancelledError):
        reply.result(timeout=0)


async def test_caches_are_reset_and_adapters_forgotten_where_there_is_no_replica() -> None:
    async with FakeFleet(replicas=0) as fleet:
        assert await fleet.call("reset_mm_cache") == []
        assert await fleet.call(FORGET_LORA, 7) == []
        with pytest.raises(NoReplicaError, match="No replica can take the call pause_scheduler right now"):
            await fleet.call("pause_scheduler", "abort", True)


async def test_a_call_during_which_all_replicas_are_lost_may_be_repeated(fleet: FakeFleet) -> None:
    """It is no refusal: behind HTTP it is 503, and no traceback."""
    for link in fleet.links.values():
        link.on_call = lambda link, *call: link.say_dead()
    with pytest.raises(NoReplicaError, match=r"No replica answered the call is_sleeping: .* is gone: .*\. Please try"):
        await fleet.call("is_sleeping")
