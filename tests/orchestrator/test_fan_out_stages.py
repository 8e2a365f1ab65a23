"""Calls to the replicas of several stages, and what those that attach later are told of them."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.links import FakeLink, answer_calls, refuse_calls
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.errors import NoReplicaError, ReplicaError
from vllm_omni_plugin.orchestrator.fleet_control import FleetControl
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCalls
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallReplicas
from vllm_omni_plugin.replicas.client.stage_client import StageClient

SLEEP = ("sleep", 1, "abort")
TOLD_TO_SLEEP = [("sleep", [1, "wait"])]


class Stages:
    """Two stages: one of two replicas, one of one.

    Attributes:
        links: those of the replicas, by name.
        distrusted: names of the replicas that were taken out.
    """

    def __init__(self) -> None:
        self.pools = [StagePool(stage_id, LeastQueueLengthBalancer()) for stage_id in range(2)]
        self.links = {name: self.serve(*name) for name in ((0, 0), (0, 1), (1, 0))}
        self.distrusted: list[str] = []
        self.orchestrator = Orchestrator(self.pools, [FakeEngineApi() for _ in self.pools], 3, lambda: 0.0)
        self.orchestrator.stage_calls = tuple(
            StageCalls(pool, lambda member, reason: self.distrusted.append(member.name)) for pool in self.pools
        )
        self.control = FleetControl(self.orchestrator, FleetCalls(self.orchestrator))

    def serve(self, stage_id: int, replica_id: int) -> FakeLink:
        """A replica serves from now on, and takes every call."""
        member = self.pools[stage_id].add(replica_id)
        link = willing(f"replica-{member.name}")
        client = StageClient(link, FakeEngineApi(), member.name, lambda outputs: None, lambda reason: None)
        client.start()
        self.pools[stage_id].serve(member, client, "", "")
        return link

    def lose(self, stage_id: int, replica_id: int) -> None:
        pool = self.pools[stage_id]
        member = pool.member(replica_id)
        member.client = None

    async def call(self, method: str, *args: Any, stages: tuple[int, ...] | None = None) -> list[Any]:
        reply: Future[list[Any]] = Future()
        self.orchestrator.rpc_async_queue.force_put(CallReplicas(method, args, reply, stages))
        async with asyncio.timeout(5):
            return await asyncio.wrap_future(reply)

    async def told(self, stage_id: int) -> list[tuple[str, list[Any]]]:
        """What a replica that attaches to a stage is told."""
        link = willing("joiner")
        client = StageClient(link, FakeEngineApi(), "joiner", lambda outputs: None, lambda reason: None)
        client.start()
        async with asyncio.timeout(5):
            await self.orchestrator.stage_calls[stage_id].bring_up_to_date(client, told=False, remote=False)
        return [(method, args) for _, method, args in link.calls]


def willing(name: str) -> FakeLink:
    link = FakeLink(name)
    link.on_call = answer_calls
    return link


@pytest.fixture
async def stages() -> AsyncIterator[Stages]:
    stages = Stages()
    serving = asyncio.create_task(stages.control.run())
    yield stages
    stages.orchestrator.close_queues()
    await serving


async def test_a_call_reaches_all_stages_and_its_results_are_in_their_order(stages: Stages) -> None:
    for (stage_id, replica_id), link in stages.links.items():
        result = 10 * stage_id + replica_id
        link.on_call = lambda link, call_id, method, args, result=result: link.answer(call_id, result)
    assert await stages.call("is_sleeping") == [0, 1, 10]


async def test_a_call_to_some_stages_reaches_no_other_now_or_later(stages: Stages) -> None:
    assert await stages.call("set_weight_version", "v2", stages=(0,)) == ["set_weight_version"] * 2
    assert stages.links[1, 0].calls == []
    assert await stages.told(0) == [("set_weight_version", ["v2"])]
    assert await stages.told(1) == []


async def test_a_stage_without_replicas_is_told_when_it_has_one_what_the_others_took(stages: Stages) -> None:
    stages.lose(1, 0)
    assert await stages.call(*SLEEP) == ["sleep"] * 2
    assert await stages.told(1) == TOLD_TO_SLEEP


async def test_a_stage_without_replicas_is_not_told_what_the_others_refused(stages: Stages) -> None:
    stages.lose(1, 0)
    for replica_id in range(2):
        stages.links[0, replica_id].on_call = refuse_calls
    with pytest.raises(ReplicaError, match="refuses sleep"):
        await stages.call(*SLEEP)
    assert await stages.told(1) == []


async def test_a_call_to_stages_without_replicas_is_refused_and_told_to_nobody(stages: Stages) -> None:
    stages.lose(1, 0)
    with pytest.raises(NoReplicaError):
        await stages.call(*SLEEP, stages=(1,))
    assert await stages.told(0) == await stages.told(1) == []
    assert await stages.call("reset_prefix_cache", stages=(1,)) == []


async def test_a_call_that_one_stage_refuses_is_an_error_and_the_others_have_taken_it(stages: Stages) -> None:
    stages.links[1, 0].on_call = refuse_calls
    with pytest.raises(ReplicaError, match=r"replica-1\.0/in refuses sleep"):
        await stages.call(*SLEEP)
    assert await stages.told(0) == TOLD_TO_SLEEP
    assert await stages.told(1) == []
    assert stages.distrusted == []
