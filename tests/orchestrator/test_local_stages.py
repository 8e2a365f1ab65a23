"""The replicas of several stages on this node, started and ended together."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.engines import READY, UNPROBED, FakeLauncher, Plan
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator.attachment.local_replicas import LocalReplicas, LocalStage
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pipeline.preparation import Preparation
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import VLLM_ENGINE, Modality, Stage
from vllm_omni_plugin.replicas.engine.engine_keeper import Timing

PIPELINE = Pipeline(
    (
        Stage(0, "thinker", VLLM_ENGINE, Modality.TEXT, model="m"),
        Stage(1, "refiner", VLLM_ENGINE, Modality.TEXT, model="n", inputs=("thinker",), final=True),
        Stage(2, "other", VLLM_ENGINE, Modality.TEXT, model="o", inputs=("thinker",), final=True),
    )
)


class Node:
    """One replica of the first stage, two of the second, none of the third."""

    def __init__(self) -> None:
        self.pools = [StagePool(stage_id, LeastQueueLengthBalancer()) for stage_id in range(3)]
        apis = [FakeEngineApi() for _ in range(3)]
        self.orchestrator = Orchestrator(self.pools, apis, 3, lambda: 0.0, preparation=Preparation(PIPELINE, apis, str))  # type: ignore[arg-type]
        self.launchers = [FakeLauncher() for _ in range(3)]
        stages = [
            LocalStage(stage_id, count, self.launchers[stage_id], apis[stage_id])
            for stage_id, count in enumerate((1, 2, 0))
        ]
        self.replicas = LocalReplicas(self.orchestrator, stages, Timing(*UNPROBED, lambda: 0.0))

    @property
    def serving(self) -> list[str]:
        return [member.name for pool in self.pools for member in pool.serving]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    running = asyncio.create_task(node.orchestrator.run())
    yield node
    await node.replicas.close(0.0)
    node.orchestrator.close_queues()
    await running
    engines = [engine for launcher in node.launchers for engine in launcher.engines]
    assert all(engine.process.ended for engine in engines)
    for launcher in node.launchers:
        launcher.close()


async def test_a_start_returns_when_all_stages_serve_with_their_ready_responses(node: Node) -> None:
    assert await node.replicas.start() == [[READY], [READY, READY], []]
    assert node.serving == ["0.0", "1.0", "1.1"]


async def test_a_start_that_fails_names_the_stage_and_leaves_none_loading(node: Node) -> None:
    node.launchers[0].plan(0, Plan(ready=False))
    node.launchers[1].plan(1, Plan(refuse="no such model"))
    with pytest.raises(ReplicaError, match="stage 1: no such model"):
        await node.replicas.start()
    await eventually(lambda: all(engine.process.ended for engine in node.launchers[0].engines), "the end of the other")


async def test_a_replica_that_is_removed_is_the_one_of_its_stage(node: Node) -> None:
    await node.replicas.start()
    node.replicas.leave(node.pools[1].member(0))
    assert node.serving == ["0.0", "1.1"]
    launcher = node.launchers[1]
    (engine,) = (engine for engine in launcher.engines if engine.identity == launcher.identity(0))
    await eventually(lambda: engine.process.ended, "the end of its engine")
