"""Replicas of a pipeline's stages are lost: requests go on as if nothing had happened, or end with one clear error."""

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError


async def test_the_moves_of_one_stage_do_not_count_for_another() -> None:
    async with FakePipelineFleet(CHAIN, replicas=2, migration_limit=1) as fleet:
        await fleet.submit("r", "text", move="replay")
        for stage_id in (0, 1):
            fleet.attempt("r", stage_id)[0].say_dead()
            await fleet.step("r", stage_id, count=9)
        assert fleet.call_ends("r") == [None]


@pytest.mark.parametrize("delivered", [False, True])
async def test_the_last_replica_of_a_stage_is_lost(delivered: bool) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", move="replay")
        if delivered:
            await fleet.step("r", 0)
        fleet.lose(0, 0)
        await fleet.read()
        ((_, error),) = fleet.ends
        assert type(error) is (RequestLostError if delivered else NoReplicaError)
        assert str(error).startswith("Stage 'thinker': ")
        assert fleet.call_ends("r") == [error]
