"""The table of scenarios on played engines, in pipelines of every shape."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN, DIAMOND, DISAGGREGATED, SPEECH
from tests.pipeline.scenarios import SCENARIOS
from vllm_omni_plugin.pipeline import Modality, Stage

SHAPES = {
    "chain": (CHAIN, ("text",)),
    "diamond": (DIAMOND, ("text",)),
    "prefill": (DISAGGREGATED, ("text",)),
    "speech": (SPEECH, ("text", "audio")),
}
Got = dict[str, list[int]]


class Played:
    """Each stage has two replicas."""

    def __init__(self, stages: Sequence[Stage], modalities: Sequence[str]) -> None:
        self.fleet = FakePipelineFleet(stages, replicas=2)
        self._modalities = modalities
        self._shown = [stage.name for stage in stages if stage.is_vllm and stage.output is not Modality.KV_CACHE]
        self._asked = 0

    async def submit(self) -> str:
        self._asked += 1
        name = f"r{self._asked}"
        await self.fleet.submit(name, *self._modalities, outputs=self._shown, prompt=[3, 4, 5], move="replay")
        return name

    async def answer(self, name: str) -> Got:
        await self.fleet.finish(name)
        assert self.fleet.call_ends(name) == [None]
        assert [end for request, end in self.fleet.ends if request == name] == ["stop"]
        return self.fleet.received(name)

    async def ask(self) -> Got:
        return await self.answer(await self.submit())

    async def check(self, answer: Got) -> None:
        async with FakePipelineFleet(self.fleet.pipeline.stages) as alone:
            await alone.submit("r", *self._modalities, outputs=self._shown, prompt=[3, 4, 5])
            await alone.finish()
            assert answer == alone.received("r")

    @asynccontextmanager
    async def halted_in(self, stage_id: int) -> AsyncIterator["PlayedCall"]:
        call = self.call = PlayedCall(self, await self.submit())
        while (call.name, stage_id) not in (at_work := set(self.fleet.at_work([call.name]))):
            await self.fleet.step(*min(at_work))
        link, attempt = self.fleet.attempt(call.name, stage_id)
        if link.left(attempt) > 1:
            # In the middle of what the client has begun to get.
            await self.fleet.step(call.name, stage_id)
        yield call

    async def kill(self, stage_id: int) -> None:
        replica_id = self.fleet.states[self.call.name].runs[stage_id].replica_id
        assert replica_id is not None
        self.fleet.kill(stage_id, replica_id)
        self.fleet.join(self.fleet.pools[stage_id].member(replica_id))

    async def rests(self) -> None:
        await self.fleet.settle()
        assert (self.fleet.states, self.fleet.in_flight) == ({}, 0)
        assert not any(link.attempts for link in self.fleet.links.values())


class PlayedCall:
    def __init__(self, world: Played, name: str) -> None:
        self.name = name
        self._world = world

    async def answer(self) -> Got:
        return await self._world.answer(self.name)

    async def leave(self) -> None:
        await self._world.fleet.abort(self.name, whole=True)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_happens_to_a_request(shape: str, scenario: Any) -> None:
    stages, modalities = SHAPES[shape]
    for stage in stages:
        world = Played(stages, modalities)
        async with world.fleet:
            await scenario(world, stage.id)
