"""Replicas of a pipeline's stages are lost: requests go on as if nothing had happened, or end with one clear error."""

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN, SPEECH
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError


async def test_a_moved_session_keeps_all_chunks_including_those_that_came_without_a_replica() -> None:
    async with FakePipelineFleet(SPEECH, replicas=[1, 1, 1], replica_wait=600.0) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3])
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.step("r", 1)
        fleet.lose(1, 0)
        await fleet.step("r", 0)
        assert fleet.orchestrator.metrics.waiting_in[1]().held == 1
        link = fleet.join(fleet.pools[1].member(0))
        assert [body["prompt"] for body in link.requests] == [[4, 7], [10, 13], []]
        assert [body["resumable"] for body in link.requests] == [True, True, False]
        assert len({body["request_id"] for body in link.requests}) == 1
        swallowed = fleet.orchestrator.metrics.tokens_swallowed
        await fleet.finish()
        assert fleet.orchestrator.metrics.tokens_swallowed == swallowed + 1
        assert fleet.call_ends("r") == [None]


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
