"""Calls to the replicas of several stages, and what those that attach later are told of them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.links import answer_calls, refuse_calls
from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from vllm_omni_plugin.errors import NoReplicaError, ReplicaError

SLEEP = ("sleep", 1, "abort")
TOLD_TO_SLEEP = [("sleep", [1, "wait"])]


@pytest.fixture
async def fleet() -> AsyncIterator[FakePipelineFleet]:
    """Two stages, one of two replicas and one of one, which take every call."""
    async with FakePipelineFleet(CHAIN, replicas=[2, 1]) as fleet:
        for link in fleet.links.values():
            link.on_call = answer_calls
        yield fleet


async def test_a_call_reaches_all_stages_and_its_results_are_in_their_order(fleet: FakePipelineFleet) -> None:
    for (stage_id, replica_id), link in fleet.links.items():
        result = 10 * stage_id + replica_id
        link.on_call = lambda link, call_id, method, args, result=result: link.answer(call_id, result)
    assert await fleet.call("is_sleeping") == [0, 1, 10]


async def test_a_call_to_some_stages_reaches_no_other_now_or_later(fleet: FakePipelineFleet) -> None:
    assert await fleet.call("set_weight_version", "v2", stages=(0,)) == ["set_weight_version"] * 2
    assert fleet.links[1, 0].calls == []
    assert await fleet.told(0) == [("set_weight_version", ["v2"])]
    assert await fleet.told(1) == []


async def test_a_stage_without_replicas_is_told_when_it_has_one_what_the_others_took(fleet: FakePipelineFleet) -> None:
    fleet.lose(1, 0)
    assert await fleet.call(*SLEEP) == ["sleep"] * 2
    assert await fleet.told(1) == TOLD_TO_SLEEP


async def test_a_stage_without_replicas_is_not_told_what_the_others_refused(fleet: FakePipelineFleet) -> None:
    fleet.lose(1, 0)
    for replica_id in range(2):
        fleet.links[0, replica_id].on_call = refuse_calls
    with pytest.raises(ReplicaError, match="refuses sleep"):
        await fleet.call(*SLEEP)
    assert await fleet.told(1) == []


async def test_a_call_to_stages_without_replicas_is_refused_and_told_to_nobody(fleet: FakePipelineFleet) -> None:
    fleet.lose(1, 0)
    with pytest.raises(NoReplicaError):
        await fleet.call(*SLEEP, stages=(1,))
    assert await fleet.told(0) == await fleet.told(1) == []
    assert await fleet.call("reset_prefix_cache", stages=(1,)) == []


@pytest.mark.parametrize(
    ("call", "told"),
    [(SLEEP, TOLD_TO_SLEEP), (("set_weight_version", "v2"), [("set_weight_version", ["v2"])])],
    ids=["stage by stage", "at once"],
)
async def test_a_call_that_one_stage_refuses_is_an_error_and_the_others_have_taken_it(
    fleet: FakePipelineFleet, call: tuple[Any, ...], told: list[Any]
) -> None:
    fleet.links[1, 0].on_call = refuse_calls
    with pytest.raises(ReplicaError, match=rf"replica-1\.0/in refuses {call[0]}"):
        await fleet.call(*call)
    assert await fleet.told(0) == told
    assert await fleet.told(1) == []
    assert all(len(pool.serving) == len(pool.members) for pool in fleet.pools)
