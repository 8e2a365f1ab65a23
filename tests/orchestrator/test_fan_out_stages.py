"""Operator calls to the replicas of several stages, and their replay to replicas that attach later."""

import asyncio
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

import pytest
from msgspec.structs import asdict

from tests.fakes.conditions import eventually
from tests.fakes.links import answer_calls, refuse_calls
from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from vllm_omni_plugin.coordinator import Welcome
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, StageState
from vllm_omni_plugin.coordinator.protocol.head_messages import CallDone, CallFinished, CallMessageFromHead, RelayedCall
from vllm_omni_plugin.errors import NoReplicaError, ReplicaError
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls

SLEEP = ("sleep", 1, "abort")
ASLEEP = [("sleep", [1, "wait"])]


@pytest.fixture
async def fleet() -> AsyncIterator[FakePipelineFleet]:
    """Two stages, one of two replicas and one of one, which take every call."""
    async with FakePipelineFleet(CHAIN, replicas=[2, 1]) as fleet:
        fleet.answer_with(answer_calls)
        yield fleet


async def test_a_call_reaches_all_stages_and_its_results_are_in_their_order(fleet: FakePipelineFleet) -> None:
    for (stage_id, replica_id), link in fleet.links.items():
        result = 10 * stage_id + replica_id
        link.on_call = lambda link, call_id, method, args, result=result: link.answer(call_id, result)
    assert await fleet.call("is_sleeping") == [0, 1, 10]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_pause_reaches_all_stages_at_once_whatever_is_between_them(fleet: FakePipelineFleet, mode: str) -> None:
    await fleet.submit("between")
    link, attempt = fleet.attempt("between", 0)
    link.step(attempt, 9)
    fleet.answer_with(None)
    reply = fleet.ask("pause_scheduler", mode, True)
    await eventually(lambda: all(link.calls for link in fleet.links.values()), "the call")
    assert not reply.done()
    fleet.answer_with(answer_calls)
    for link in fleet.links.values():
        link.answer(link.calls[0][0])
    assert len(await asyncio.wrap_future(reply)) == 3


async def test_a_call_to_some_stages_does_not_reach_others_now_or_in_a_replay(fleet: FakePipelineFleet) -> None:
    assert await fleet.call("set_weight_version", "v2", stages=(0,)) == ["set_weight_version"] * 2
    assert fleet.links[1, 0].calls == []
    assert await fleet.replayed(0) == [("set_weight_version", ["v2"])]
    assert await fleet.replayed(1) == []


@pytest.mark.parametrize("refused", [False, True])
async def test_a_stage_without_replicas_replays_later_what_other_stages_accepted(
    fleet: FakePipelineFleet, refused: bool
) -> None:
    fleet.lose(1, 0)
    if refused:
        fleet.answer_with(refuse_calls)
    [answer] = await asyncio.gather(fleet.call(*SLEEP), return_exceptions=True)
    if refused:
        assert isinstance(answer, ReplicaError), answer
        assert "refuses sleep" in str(answer)
    else:
        assert answer == ["sleep"] * 2
    assert await fleet.replayed(1) == ([] if refused else ASLEEP)


async def test_a_call_to_stages_without_replicas_is_refused_and_not_recorded(fleet: FakePipelineFleet) -> None:
    fleet.lose(1, 0)
    with pytest.raises(NoReplicaError):
        await fleet.call(*SLEEP, stages=(1,))
    assert await fleet.replayed(0) == await fleet.replayed(1) == []
    assert await fleet.call("reset_prefix_cache", stages=(1,)) == []


@pytest.mark.parametrize(
    ("call", "replayed"), [(SLEEP, ASLEEP), (("set_weight_version", "v2"), [("set_weight_version", ["v2"])])]
)
async def test_a_call_that_one_stage_refuses_is_an_error_and_holds_in_the_other_stages(
    fleet: FakePipelineFleet, call: tuple[Any, ...], replayed: list[Any]
) -> None:
    fleet.links[1, 0].on_call = refuse_calls
    with pytest.raises(ReplicaError, match=rf"replica-1\.0/in refuses {call[0]}"):
        await fleet.call(*call)
    assert await fleet.replayed(0) == replayed
    assert await fleet.replayed(1) == []
    assert all(len(pool.serving) == len(pool.members) for pool in fleet.pools)


class PlayedHead(FakePipelineFleet):
    """A head of two stages beside another one, "b"; the test plays the coordinator.

    Attributes:
        sent: messages of this head to the coordinator.
    """

    def __init__(self) -> None:
        super().__init__(CHAIN, replicas=[2, 1])
        self.sent: list[Any] = []
        self.receive = self.fleet_calls.handle
        self.answer_with(answer_calls)

    @cached_property
    def fleet_calls(self) -> FleetCalls:
        return FleetCalls(self.orchestrator, "a", lambda: self)  # type: ignore[arg-type, return-value]

    def send(self, message: CallMessageFromHead) -> bool:
        """As `OmniCoordClientForHead`."""
        self.sent.append(message)
        return True

    async def notified_sleep_level(self) -> int:
        """Wait for an update to AsyncLLM; returns its sleep level."""
        async with asyncio.timeout(10):
            [update] = await self.orchestrator.front_end.output_async_queue.get_batch()
        update.applied.set_result(None)
        level: int = update.sleep_level
        return level


@pytest.fixture
async def head() -> AsyncIterator[PlayedHead]:
    async with PlayedHead() as head:
        head.receive(Welcome(["b"]))
        head.receive(FleetState())
        yield head


async def test_a_call_that_one_stage_refuses_changes_the_document_for_the_other(head: PlayedHead) -> None:
    head.links[1, 0].on_call = refuse_calls
    reply = head.ask("set_weight_version", "v2")
    await eventually(lambda: head.sent)
    call = head.sent[0]
    assert [stage.weight_version for stage in call.state.stages] == ["v2"]
    assert (call.stages, len(call.reached), call.failed) == ([0], 2, [])
    head.receive(RelayedCall(**asdict(call), head_id="a"))
    head.receive(CallFinished(call.call_id))
    with pytest.raises(ReplicaError, match=r"replica-1\.0/in refuses"):
        await asyncio.wrap_future(reply)


async def test_a_replica_lost_during_its_call_has_failed_it_where_others_accepted_it(head: PlayedHead) -> None:
    link = head.links[0, 1]
    link.on_call = None
    head.ask("set_weight_version", "v2").add_done_callback(lambda reply: None)
    await eventually(lambda: link.calls)
    lost = head.pools[0].member(1).engine_key
    link.say_dead()
    await eventually(lambda: head.sent)
    assert head.sent[0].failed == [lost]


async def test_the_server_is_notified_of_another_heads_call_to_one_stage(head: PlayedHead) -> None:
    asleep = StageState()
    asleep.pause.sleep(2, "wait")
    reached = [member.engine_key for member in head.pools[0].members]
    state = FleetState(1, "b", (asleep,))
    head.receive(RelayedCall(1, "sleep", [2, "abort"], [0], state, reached=reached, head_id="b"))
    assert await head.notified_sleep_level() == 2
    await eventually(lambda: head.sent == [CallDone(1, "b")])
    assert [link.calls for link in head.links.values()] == [[], [], []]
