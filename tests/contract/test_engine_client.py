"""What AsyncLLM takes for granted of any engine client, asked of the fleet's."""

import asyncio
import time
from collections.abc import Iterator
from unittest.mock import create_autospec

import pytest

from vllm_omni_plugin.balancing import RandomBalancer
from vllm_omni_plugin.integration.client import FleetClient
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.thread import OrchestratorThread
from vllm_omni_plugin.vllm_api.engine_api import EngineApi


@pytest.fixture
def orchestrator() -> Orchestrator:
    return Orchestrator([StagePool(0, RandomBalancer())], EngineApi(), 0, time.monotonic)


@pytest.fixture
def client(orchestrator: Orchestrator) -> Iterator[FleetClient]:
    client = FleetClient(orchestrator, create_autospec(OrchestratorThread, instance=True), {})
    yield client
    client.shutdown()


async def test_a_backlog_of_outputs_does_not_keep_the_loop_from_other_work(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    for engine_index in range(10):
        orchestrator.output_async_queue.force_put(EngineApi().idle_report(engine_index))
    taken: list[int] = []

    async def take_all() -> None:
        while len(taken) < 10:
            taken.append((await client.get_output_async()).engine_index)

    async def other_work() -> int:
        return len(taken)

    _, taken_before_other_work = await asyncio.gather(take_all(), other_work())
    assert taken_before_other_work < 10
    assert taken == list(range(10))
