"""A request that engines die of in the second of two stages: two engines at most, and its neighbours lose nothing."""

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN
from vllm_omni_plugin.errors import QueryOfDeathError
from vllm_omni_plugin.pipeline.transfer import StageInput

NEIGHBOURS, POISON = "abcdef", "p"
REFINER = 1
"""The stage of which engines die."""
STEP_S = 0.02
STEPS = 200


class Refiners:
    """Engines of the second stage that say one token of each request in each step, and die of one.

    Args:
        fleet: where they are the replicas.
        dies_at: tokens that an engine says of the poison before it dies of it; None: it does not.
        return_after: steps after which an engine that has died is there again.

    Attributes:
        deaths: replicas whose engines have died, in order.
    """

    def __init__(self, fleet: FakePipelineFleet, dies_at: int | None, return_after: int) -> None:
        self.deaths: list[int] = []
        self._fleet = fleet
        self._dies_at = dies_at
        self._return_after = return_after
        self._returns: dict[int, int] = {}

    async def run(self) -> None:
        """Let them work until all requests have ended."""
        fleet = self._fleet
        for step in range(STEPS):
            fleet.now += STEP_S
            if step in self._returns:
                fleet.join(fleet.pools[REFINER].member(self._returns.pop(step)))
            for member in list(fleet.pools[REFINER].serving):
                self._step(member.replica_id, step)
            fleet.orchestrator._tick()
            await fleet.settle()
            if not fleet.states:
                return

    def _step(self, replica_id: int, step: int) -> None:
        link = self._fleet.links[REFINER, replica_id]
        in_flight = self._fleet.pools[REFINER].member(replica_id).in_flight
        said = {run.request_id: link.attempts[attempt].said for attempt, run in in_flight.items()}
        if self._dies_at is not None and said.get(POISON) == self._dies_at:
            self.deaths.append(replica_id)
            self._returns[step + self._return_after] = replica_id
            self._fleet.lose(REFINER, replica_id)
            return
        for attempt in list(in_flight):
            link.step(attempt)


async def answered(dies_at: int | None, return_after: int = STEPS) -> tuple[FakePipelineFleet, list[int]]:
    """All requests are through, and engines have died of the poison: the fleet, and which did."""
    async with FakePipelineFleet(CHAIN, replicas=[1, 3], migration_limit=1, replica_wait=60.0) as fleet:
        for number, name in enumerate((*NEIGHBOURS[:3], POISON, *NEIGHBOURS[3:])):
            # To each another answer, of four tokens.
            given = {"refiner": StageInput(token_ids=[3 + 4 * number])}
            await fleet.submit(name, "text", prompt=[number], move="replay", params=given)
            await fleet.step(name, 0, count=9)
        refiners = Refiners(fleet, dies_at, return_after)
        await refiners.run()
        return fleet, refiners.deaths


@pytest.mark.parametrize("return_after", [STEPS, 20, 2])
@pytest.mark.parametrize("dies_at", [0, 1, 3])
async def test_a_request_that_kills_in_the_second_stage_kills_two_of_three_engines_and_no_neighbour(
    dies_at: int, return_after: int
) -> None:
    undisturbed, _ = await answered(None)
    assert dict(undisturbed.ends) == dict.fromkeys((*NEIGHBOURS, POISON), "stop")
    fleet, deaths = await answered(dies_at, return_after)
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
