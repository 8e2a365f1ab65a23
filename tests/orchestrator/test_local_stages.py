"""The replicas of several stages on this node, started and ended together."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engines import READY, FakeLauncher, Plan
from tests.orchestrator.local_node import Node, running_node
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Pipeline, Stage

PIPELINE = Pipeline(
    (
        Stage(0, "thinker", VLLM_ENGINE, Modality.TEXT, model="m"),
        Stage(1, "refiner", VLLM_ENGINE, Modality.TEXT, model="n", inputs=("thinker",), final=True),
        Stage(2, "other", VLLM_ENGINE, Modality.TEXT, model="o", inputs=("thinker",), final=True),
    )
)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """One replica of the first stage, two of the second, none of the third."""
    async with running_node(FakeLauncher, (1, 2, 0), PIPELINE) as node:
        yield node


def serving(node: Node) -> list[str]:
    return [member.name for pool in node.pools for member in pool.serving]


async def test_a_start_returns_when_all_stages_serve_with_their_ready_responses(node: Node) -> None:
    assert await node.replicas.start() == [[READY], [READY, READY], []]
    assert serving(node) == ["0.0", "1.0", "1.1"]


@pytest.mark.parametrize("loads", [True, False], ids=["loads", "serves"])
async def test_a_start_that_fails_names_the_stage_and_ends_the_engines_of_others(node: Node, loads: bool) -> None:
    gate = threading.Event()
    node.launchers[0].plan(0, Plan(ready=not loads))
    for replica_id in range(2):
        node.launchers[1].plan(replica_id, Plan(spawn_gate=gate, refuse="no such model"))
    starting = asyncio.create_task(node.replicas.start())
    await eventually(lambda: node.launchers[0].engines if loads else serving(node))
    gate.set()
    with pytest.raises(ReplicaError, match="stage 1: no such model"):
        await starting
    await eventually(lambda: all(engine.process.ended for engine in node.launchers[0].engines), "the end of the other")


async def test_a_replica_that_is_removed_is_the_one_of_its_stage(node: Node) -> None:
    await node.replicas.start()
    node.replicas.leave(node.pools[1].member(0))
    assert serving(node) == ["0.0", "1.1"]
    launcher = node.launchers[1]
    (engine,) = (engine for engine in launcher.engines if engine.identity == launcher.identity(0))
    await eventually(lambda: engine.process.ended, "the end of its engine")
