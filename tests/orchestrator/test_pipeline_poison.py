"""A request that engines die of in the second of two stages: two engines at most, and its neighbours lose nothing."""

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from vllm_omni_plugin.errors import QueryOfDeathError
from vllm_omni_plugin.pipeline import StageInput

NEIGHBOURS, POISON = "abcdef", "p"
REFINER = 1
"""The stage of which engines die."""


async def answered(dies_at: int | None, returns: bool = False) -> tuple[FakePipelineFleet, list[int]]:
    """All requests are through. Returns the fleet, and the replicas whose engines have died of the poison, in order.

    Args:
        dies_at: tokens that an engine says of the poison before it dies of it; None: it does not.
        returns: whether an engine that has died is there again at once.
    """
    deaths: list[int] = []
    async with FakePipelineFleet(CHAIN, replicas=[1, 3], migration_limit=1, replica_wait=60.0) as fleet:
        for number, name in enumerate((*NEIGHBOURS[:3], POISON, *NEIGHBOURS[3:])):
            # To each another answer, of four tokens.
            given = {"refiner": StageInput(token_ids=[3 + 4 * number])}
            await fleet.submit(name, "text", prompt=[number], move="replay", params=given)
            await fleet.step(name, 0, count=9)
        for _ in range(100):
            for name, _ in list(fleet.at_work(list(fleet.states))):
                if (name, REFINER) not in fleet.at_work(list(fleet.states)):
                    # Its engine has just died.
                    continue
                link, attempt = fleet.attempt(name, REFINER)
                if name != POISON or link.attempts[attempt].said != dies_at:
                    link.step(attempt)
                    continue
                deaths.append(fleet.states[name].runs[REFINER].replica_id or 0)
                fleet.lose(REFINER, deaths[-1])
                if returns:
                    fleet.join(fleet.pools[REFINER].member(deaths[-1]))
            fleet.orchestrator.tick()
            await fleet.settle()
        assert fleet.states == {}
        return fleet, deaths


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("dies_at", [0, 1, 3])
async def test_a_request_that_kills_in_the_second_stage_kills_two_of_three_engines_and_no_neighbour(
    dies_at: int, returns: bool
) -> None:
    undisturbed, _ = await answered(None)
    assert dict(undisturbed.ends) == dict.fromkeys((*NEIGHBOURS, POISON), "stop")
    fleet, deaths = await answered(dies_at, returns)
    assert len(deaths) == len(set(deaths)) == 2
    ends = dict(fleet.ends)
    error = ends.pop(POISON)
    assert isinstance(error, QueryOfDeathError)
    assert str(error).startswith("Stage 'refiner': 2 engines died while they ran this request: replica ")
    assert [type(end) for end in fleet.call_ends(POISON)] == [QueryOfDeathError]
    assert ends == dict.fromkeys(NEIGHBOURS, "stop")
    assert [fleet.tokens[name] for name in NEIGHBOURS] == [undisturbed.tokens[name] for name in NEIGHBOURS]
    assert fleet.orchestrator.metrics.requests_failed["query_of_death"] == 1
    [event] = [event for event in fleet.orchestrator.events.after() if event.kind == "query_of_death"]
    assert f"replica 1.{deaths[0]} with " in event.reason
    # The stage in front has lost nothing, and nothing was asked of it again.
    assert len(fleet.links[0, 0].added) == len(NEIGHBOURS) + 1
