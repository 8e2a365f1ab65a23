"""What happens to a request of a pipeline and what comes of it: played, simulated and real engines have one table."""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import pytest


class Call(Protocol):
    """A request on its way."""

    async def answer(self) -> Any:
        """Return all that its client gets."""

    async def leave(self) -> None:
        """Its client disconnects."""


class World(Protocol):
    """A pipeline as its client and its operator see it. All requests are alike.

    Its worlds: `Played` in tests/orchestrator/, `Head` and `KvHead` in tests/sim/protocol/, `ExampleWorld` in
    tests/engine/.
    """

    async def ask(self) -> Any:
        """Return the answer to a request."""

    async def check(self, answer: Any) -> None:
        """Raise AssertionError unless an answer is that of the engines when they run one after the other by hand."""

    def halted_in(self, stage_id: int) -> AbstractAsyncContextManager[Call]:
        """A request that stays in this stage meanwhile."""

    async def kill(self, stage_id: int) -> None:
        """End the engine that has the request in this stage."""

    async def rests(self) -> None:
        """Return once all replicas serve again, and nobody has anything left of any request."""


async def answered(world: World, stage_id: int) -> None:
    """Nothing happens."""
    async with world.halted_in(stage_id) as call:
        pass
    await world.check(await call.answer())
    await world.check(await world.ask())
    await world.rests()


async def killed(world: World, stage_id: int) -> None:
    """The engine of a stage dies under the request, which the client does not notice."""
    async with world.halted_in(stage_id) as call:
        await world.kill(stage_id)
    await world.check(await call.answer())
    await world.rests()
    await world.check(await world.ask())


async def left(world: World, stage_id: int) -> None:
    """The client leaves."""
    async with world.halted_in(stage_id) as call:
        await call.leave()
    await world.rests()
    await world.check(await world.ask())


SCENARIOS: tuple[Callable[[World, int], Awaitable[None]], ...] = (answered, killed, left)


def cases(stage_ids: Iterable[int], quick: Iterable[str] | None = None) -> list[Any]:
    """Each scenario in each of these stages, as parameters `scenario` and `stage_id`.

    Args:
        stage_ids: of the pipeline.
        quick: names of the cases that are not marked `long`; None: all.
    """
    found = []
    for scenario in SCENARIOS:
        for stage_id in stage_ids:
            name = f"{scenario.__name__}-{stage_id}"
            marks = [] if quick is None or name in quick else [pytest.mark.long]
            found.append(pytest.param(scenario, stage_id, id=name, marks=marks))
    return found
