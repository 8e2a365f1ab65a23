"""The operator's routes and the hold with several stages."""

import asyncio
from typing import Any

import pytest

from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.links import FakeLink
from vllm_omni_plugin.admin.hold import Hold
from vllm_omni_plugin.admin.replica_admin import FleetAdmin
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ManageReplica
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Pipeline, Stage
from vllm_omni_plugin.replicas.links.engine_client import EngineClient

PIPELINE = Pipeline(
    (
        Stage(0, "prefill", VLLM_ENGINE, Modality.KV_CACHE, model="m"),
        Stage(1, "decode", VLLM_ENGINE, Modality.TEXT, model="m", inputs=("prefill",), final=True),
        Stage(2, "talker", VLLM_ENGINE, Modality.AUDIO, model="n", inputs=("decode",), final=True),
    )
)


@pytest.fixture
def orchestrator() -> Orchestrator:
    pools = [StagePool(stage.id, LeastQueueLengthBalancer()) for stage in PIPELINE.stages]
    apis: Any = [FakeEngineApi() for _ in PIPELINE.stages]
    orchestrator = Orchestrator(pools, apis, 0, lambda: 0.0, input_builder=StageInputBuilder(PIPELINE, apis, str))
    for pool, count in zip(pools, (1, 2, 1), strict=True):
        for _ in range(count):
            pool.add()
    return orchestrator


def serve(orchestrator: Orchestrator, stage_id: int) -> None:
    pool = orchestrator.stage_pools[stage_id]
    client = EngineClient(FakeLink(), FakeEngineApi(), "", lambda outputs: None, lambda reason: None)
    pool.serve(pool.members[0], client, "", "")


async def test_a_change_reaches_the_replica_of_its_stage(orchestrator: Orchestrator) -> None:
    managing = asyncio.create_task(
        FleetAdmin(orchestrator, FleetCalls(orchestrator), lambda: 0.0).manage("1.1", "drain")
    )
    (message,) = await orchestrator.rpc_async_queue.get_batch()
    assert isinstance(message, ManageReplica)
    assert (message.stage_id, message.replica_id, message.action) == (1, 1, "drain")
    message.reply.set_result(None)
    await managing


async def test_a_request_waits_for_the_stages_with_text_output(
    orchestrator: Orchestrator,
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    hold = Hold(orchestrator, never, 0.0, lambda: "", never)
    assert hold.is_needed
    with pytest.raises(NoReplicaError, match=r"No replica of stage 1 .*replica 0 is down, replica 1 is down"):
        await hold.wait(never, has_key=True)
    serve(orchestrator, 1)
    assert not hold.is_needed
