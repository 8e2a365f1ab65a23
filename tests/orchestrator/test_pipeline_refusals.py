"""Requests of a pipeline that cannot be answered: the error names the stage."""

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError, StageInputError


async def test_what_the_front_stage_cannot_answer_is_refused_before_any_stage_begins() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.apis[-1].faults["check_front"] = StageInputError("Stage 'last': no logprobs")
        await fleet.submit("a", "text")
        ((request_id, error),) = fleet.ends
        assert (request_id, type(error), str(error)) == ("a", StageInputError, "Stage 'last': no logprobs")
        assert [str(end) for end in fleet.call_ends("a")] == ["Stage 'last': no logprobs"]
        assert (fleet.states, fleet.in_flight) == ({}, 0)
        assert not any(link.requests for link in fleet.links.values())


async def test_a_lost_replica_is_named_with_its_stage() -> None:
    async with FakePipelineFleet(CHAIN, migration_limit=0) as fleet:
        await fleet.submit("a", "text")
        fleet.lose(0, 0)
        await fleet.read()
        ((_, error),) = fleet.ends
        assert isinstance(error, RequestLostError)
        assert str(error).startswith(f"Stage {CHAIN[0].name!r}: Replica 0 was lost")


async def test_a_stage_without_replicas_is_named() -> None:
    async with FakePipelineFleet(CHAIN, replicas=[0, *(1 for _ in CHAIN[1:])]) as fleet:
        await fleet.submit("a", "text")
        ((_, error),) = fleet.ends
        assert isinstance(error, NoReplicaError)
        assert str(error).startswith(f"Stage {CHAIN[0].name!r}: No replica of stage 0 can serve")
