"""The operator's routes and the hold with several stages."""

import asyncio

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from vllm_omni_plugin.admin.hold import Hold
from vllm_omni_plugin.admin.operator_actions import FleetAdmin
from vllm_omni_plugin.errors import NoReplicaError

PREFILL, DECODE, TALKER = range(3)
STAGES = (
    stage(PREFILL, "prefill", "kv_cache", model="one"),
    stage(DECODE, "decode", "text", "prefill", model="one", transform="kv_transfer", final=True),
    stage(TALKER, "talker", "audio", "decode", engine="acme.stages:Any", final=True),
)


async def test_a_change_reaches_the_replica_of_its_stage() -> None:
    async with FakePipelineFleet(STAGES, (1, 2, 1)) as fleet:
        await FleetAdmin(fleet.orchestrator, fleet.fleet_calls, fleet.clock).manage("1.1", "drain")
        assert [member.name for pool in fleet.pools for member in pool.members if member.cordons] == ["1.1"]


async def test_a_request_waits_for_the_stages_with_text_output() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with FakePipelineFleet(STAGES, (1, 2, 1)) as fleet:
        hold = Hold(fleet.orchestrator, never, 0.0, lambda: "", never)
        for stage_id, replica_id in ((PREFILL, 0), (TALKER, 0), (DECODE, 0)):
            assert not hold.is_needed
            fleet.lose(stage_id, replica_id)
        fleet.lose(DECODE, 1)
        assert hold.is_needed
        with pytest.raises(NoReplicaError, match=r"No replica of stage 1 .*replica 0 is down, replica 1 is down"):
            await hold.wait(never, has_key=True)
