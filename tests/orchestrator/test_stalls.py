"""Engines that answer and compute nothing: which of them count as stalled, and what becomes of their requests.

And how they come back: one of this node is restarted, and a request is tried before the replica gets others.
"""

from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeOutput, FakeOutputs, FakeRequest
from tests.fakes.engines import UNPROBED, FakeLauncher
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import answer_calls
from tests.orchestrator.local_node import Node, received, running_node
from tests.orchestrator.remote_fleet import Fleet
from tests.orchestrator.test_replica_list import row
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator import PoolMember
from vllm_omni_plugin.orchestrator.attachment.remote_keeper import FIRST_STALL_PAUSE_S
from vllm_omni_plugin.orchestrator.pool.pool_member import STALL_CORDON
from vllm_omni_plugin.orchestrator.requests.load_ledger import Work

TIMEOUT_S = 60.0
UP, ERROR = ReplicaStatus.UP, ReplicaStatus.ERROR


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=2, replica_wait=600.0, stall_timeout=TIMEOUT_S) as fleet:
        yield fleet


def wait(fleet: FakeFleet | Node, seconds: float) -> None:
    """Time passes, in steps short enough that the head is never late."""
    for _ in range(round(seconds / 0.5)):
        fleet.now += 0.5
        fleet.orchestrator.tick()


def stalled(fleet: FakeFleet | Node) -> list[int]:
    return [member.replica_id for member in fleet.pool.members if STALL_CORDON in member.cordons]


def first(fleet: FakeFleet | Node) -> PoolMember:
    return fleet.pool.member(0)


async def only_first(fleet: FakeFleet, *request_ids: str, **fields: object) -> None:
    """Send requests to replica 0."""
    fleet.orchestrator.cordon(fleet.pool.member(1), "admin")
    for request_id in request_ids:
        await fleet.submit(request_id, **fields)
    fleet.orchestrator.uncordon(fleet.pool.member(1), "admin")


async def test_the_requests_of_a_stalled_replica_move_and_it_says_why(fleet: FakeFleet) -> None:
    await only_first(fleet, "a", "b")
    fleet.say("a", 5)
    wait(fleet, TIMEOUT_S - 0.5)
    assert (fleet.statuses, stalled(fleet)) == ([UP, UP], [])
    wait(fleet, 0.5)
    assert (fleet.statuses, stalled(fleet), first(fleet).stalls) == ([ERROR, UP], [0], 1)
    assert (fleet.home("a"), fleet.home("b")) == (1, 1)
    fleet.say("a", 6, finish_reason="stop")
    fleet.say("b", 7, finish_reason="stop")
    await fleet.read()
    assert fleet.tokens == {"a": [5, 6], "b": [7]}
    stall = next(event for event in fleet.orchestrator.events.after() if event.kind == "stall")
    assert (stall.replica, stall.requests) == ("0.0", 2)
    assert stall.reason == ("its engine answers, but no request there got a token for 60 s (--omni-stall-timeout)")


async def test_a_token_of_any_request_shows_that_the_replica_computes(fleet: FakeFleet) -> None:
    await only_first(fleet, "computed", "queued in the engine")
    for _ in range(5):
        wait(fleet, TIMEOUT_S - 1.0)
        fleet.say("computed", 5)
    assert stalled(fleet) == []


async def test_a_replica_without_requests_or_with_new_ones_only_has_not_stalled(fleet: FakeFleet) -> None:
    await only_first(fleet, "a")
    fleet.say("a", 5, finish_reason="stop")
    wait(fleet, TIMEOUT_S - 1.0)
    await only_first(fleet, "b")
    wait(fleet, TIMEOUT_S - 1.0)
    assert stalled(fleet) == []
    wait(fleet, 1.0)
    assert stalled(fleet) == [0]


async def test_the_limit_is_four_times_the_longest_gap_seen(fleet: FakeFleet) -> None:
    await only_first(fleet, "a")
    wait(fleet, 20.0)
    fleet.say("a", 5)
    wait(fleet, 79.5)
    assert stalled(fleet) == []
    wait(fleet, 0.5)
    assert stalled(fleet) == [0]


async def test_an_engine_that_computes_a_long_prompt_in_parts_has_not_stalled(fleet: FakeFleet) -> None:
    await only_first(fleet, "a", prompt=[1] * 1000)
    for percent in (1, 2, 3, 4):
        wait(fleet, TIMEOUT_S - 1.0)
        fleet.links[0].report(percent)
    assert stalled(fleet) == []
    # Nothing more is computed, and what an abort frees is no sign.
    for percent in (4, 3, 4):
        fleet.links[0].report(percent)
        wait(fleet, TIMEOUT_S / 3)
    assert stalled(fleet) == [0]


async def test_a_request_that_waits_for_a_kv_transfer_does_not_count_until_it_has_a_token(fleet: FakeFleet) -> None:
    await only_first(fleet, "a", kv_transfer_params={"do_remote_prefill": True})
    wait(fleet, 10 * TIMEOUT_S)
    assert stalled(fleet) == []
    fleet.say("a", 5)
    wait(fleet, TIMEOUT_S)
    assert stalled(fleet) == [0]
    assert first(fleet).request_to_try is None, "its cache cannot be fetched again"


async def test_a_session_counts_only_while_a_turn_is_open(fleet: FakeFleet) -> None:
    await only_first(fleet, "a", resumable=True)
    fleet.say("a", 5, finish_reason="stop")
    wait(fleet, 10 * TIMEOUT_S)
    assert stalled(fleet) == []
    await fleet.submit("a", resumable=True)
    wait(fleet, TIMEOUT_S - 1.0)
    assert stalled(fleet) == []
    wait(fleet, 1.0)
    assert stalled(fleet) == [0]


@pytest.mark.parametrize(
    ("halt", "go_on"), [(("pause_scheduler", "keep"), ("resume_scheduler",)), (("sleep", 1, "keep"), ("wake_up",))]
)
async def test_paused_or_sleeping_engines_have_not_stalled(
    fleet: FakeFleet, halt: tuple[str, ...], go_on: tuple[str, ...]
) -> None:
    fleet.answer_with(answer_calls)
    await only_first(fleet, "a")
    wait(fleet, TIMEOUT_S - 1.0)
    await fleet.call(*halt)
    wait(fleet, 10 * TIMEOUT_S)
    await fleet.call(*go_on)
    wait(fleet, TIMEOUT_S - 1.0)
    assert stalled(fleet) == []
    wait(fleet, 1.0)
    assert stalled(fleet) == [0]


async def test_an_engine_that_carries_out_a_long_call_has_not_stalled(fleet: FakeFleet) -> None:
    fleet.answer_with(None)
    await only_first(fleet, "a")
    reply = fleet.ask("collective_rpc", "load_from_a_slow_disk")
    await eventually(lambda: all(link.calls for link in fleet.links.values()))
    wait(fleet, 2 * TIMEOUT_S)
    assert stalled(fleet) == []
    for link in fleet.links.values():
        link.answer(link.calls[-1][0])
    await eventually(reply.done)
    wait(fleet, TIMEOUT_S - 1.0)
    assert stalled(fleet) == []
    wait(fleet, 1.0)
    assert stalled(fleet) == [0]


async def test_an_engine_that_carries_out_a_long_call_of_another_head_has_not_stalled(fleet: FakeFleet) -> None:
    await only_first(fleet, "a")
    stage = fleet.orchestrator.stage_calls[0]
    stage.set_busy(first(fleet), True)
    wait(fleet, 2 * TIMEOUT_S)
    assert stalled(fleet) == []
    stage.set_busy(first(fleet), False)
    wait(fleet, TIMEOUT_S - 1.0)
    assert stalled(fleet) == []
    wait(fleet, 1.0)
    assert stalled(fleet) == [0]


async def test_a_head_that_was_late_itself_takes_nothing_for_stalled(fleet: FakeFleet) -> None:
    await only_first(fleet, "a")
    fleet.now += 10 * TIMEOUT_S
    fleet.orchestrator.tick()
    assert stalled(fleet) == []
    wait(fleet, TIMEOUT_S)
    assert stalled(fleet) == [0]


async def test_a_prompt_computed_for_another_head_is_a_sign_and_an_abort_there_is_none(fleet: FakeFleet) -> None:
    await only_first(fleet, "a")
    work = Work(8, 4000)
    fleet.orchestrator.update_other_heads_work(first(fleet), work)
    for _ in range(3):
        wait(fleet, TIMEOUT_S - 1.0)
        work = Work(8, work.prefill_tokens - 1000)
        fleet.orchestrator.update_other_heads_work(first(fleet), work)
    wait(fleet, TIMEOUT_S - 1.0)
    assert stalled(fleet) == []
    for less in (Work(7, 500), Work(7, 500), Work(8, 900), None):
        fleet.orchestrator.update_other_heads_work(first(fleet), less)
    wait(fleet, 1.0)
    assert stalled(fleet) == [0]


async def test_of_two_stalled_replicas_none_gets_the_others_requests(fleet: FakeFleet) -> None:
    for request_id in ("a", "b"):
        await fleet.submit(request_id)
    wait(fleet, TIMEOUT_S)
    assert stalled(fleet) == [0, 1]
    assert [len(link.added) for link in fleet.links.values()] == [1, 1]
    assert fleet.orchestrator.metrics.held == 2
    assert "(replica 0 is error: it has stalled, replica 1 is error: it has stalled)" in str(fleet.pool.unavailable())


async def test_no_replica_stalls_with_a_timeout_of_0() -> None:
    async with FakeFleet(replicas=2) as fleet:
        await fleet.submit("a")
        wait(fleet, 1000.0)
        assert stalled(fleet) == []


async def test_a_stalled_replica_of_another_node_serves_again_once_a_request_tried_there_gets_a_token() -> None:
    async with Fleet(stall_timeout=TIMEOUT_S) as fleet:
        await fleet.joined(row(1, replica_id=0), row(2, replica_id=1))
        before = next(each for each in fleet.attachments if each.info.replica_id == 0)
        await only_first(fleet, "waits", prompt=[1])
        await only_first(fleet, "computed", prompt=[2])
        before.link.output(before.link.added[1], 5)
        wait(fleet, TIMEOUT_S)
        assert (fleet.statuses, before.drain_requested) == ([ERROR, UP], False)
        await eventually(lambda: len(fleet.attachments) == 3, "another attachment")
        assert (before.closed, fleet.pauses) == (True, [FIRST_STALL_PAUSE_S])
        tried = fleet.attachments[2].link
        await eventually(lambda: len(tried.added) == 1, "a request that is tried")
        assert tried.prompts[tried.added[0]] == [2], "the one that was computed there before"
        await fleet.submit("new")
        assert len(tried.added) == 1
        tried.output(tried.added[0], 7)
        await fleet.serving(2)
        assert (tried.aborted, stalled(fleet)) == (tried.added, [])
        await fleet.submit("newer")
        assert len(tried.added) == 2
        await fleet.read()
        assert fleet.tokens["computed"] == [5], "nobody gets what was only tried"
        events = [event.kind for event in fleet.orchestrator.events.after()]
        assert events[-5:] == ["stall", "lost", "move", "resume", "attach"]


async def test_a_replica_that_still_computes_nothing_is_left_and_tried_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soon = 0.01
    async with Fleet(stall_timeout=soon) as fleet:
        await fleet.joined(row(1, replica_id=0), row(2, replica_id=1))
        await only_first(fleet, "a")
        member = first(fleet)
        fleet.now += soon
        fleet.orchestrator.tick()
        await eventually(lambda: len(fleet.pauses) == 4, "more attempts")
        assert fleet.pauses == [FIRST_STALL_PAUSE_S * factor for factor in (1, 2, 4, 8)]
        assert all(each.closed for each in fleet.attachments[2:5])
        assert (stalled(fleet), member.stalls, member.status) == ([0], 1, ERROR)
        assert "a request tried there got no token" in caplog.text


async def test_nothing_is_tried_at_an_engine_that_is_paused_meanwhile() -> None:
    async with Fleet(stall_timeout=TIMEOUT_S) as fleet:
        await fleet.joined(row(1, replica_id=0), row(2, replica_id=1))
        await only_first(fleet, "a")
        fleet.pause_over.clear()
        wait(fleet, TIMEOUT_S)
        await fleet.call("pause_scheduler", "keep")
        fleet.pause_over.set()
        await fleet.serving(2)
        assert fleet.attachments[2].link.added == []


async def test_a_stalled_engine_of_this_node_is_restarted_and_tried_before_it_serves() -> None:
    async with running_node(FakeLauncher, (2,), None, UNPROBED, TIMEOUT_S) as node:
        await node.replicas.start()
        second = node.pool.member(1)
        node.pool.cordon(second, "admin")
        node.submit(FakeRequest("a", prompt=[3]))
        await eventually(lambda: first(node).queue_length == 1)
        node.orchestrator.uncordon(second, "admin")
        engine = node.engine_of(0)
        wait(node, TIMEOUT_S)
        assert (node.statuses, second.queue_length) == ([ERROR, UP], 1)
        await eventually(lambda: engine.process.ended)
        node.go_on.release()
        await eventually(lambda: len(node.launcher.engines) == 3, "a restart")
        kind, tried = await received(node.launcher.engines[2])
        assert (kind, tried["prompt"], node.statuses) == ("add", [3], [ERROR, UP])
        output = FakeOutputs(outputs=[FakeOutput(tried["request_id"], [5])])
        node.launcher.engines[2].say(msgspec.json.encode(output))
        await node.until_back(0, restarts=1)
