"""A probe tells an engine that hangs from one that is slow."""

import asyncio

import pytest

from tests.fakes.conditions import eventually
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.probe import Probe


class Engine:
    """Answers when the test says so. Its clock shows what the test sets."""

    def __init__(self, timeout: float) -> None:
        self.now = 0.0
        self.calls: list[asyncio.Future[bool]] = []
        self.events: list[str] = []
        self.probe = Probe(
            self._call, 0.0, timeout, self.events.append, lambda: self.events.append("answered"), lambda: self.now
        )

    async def answer_after(self, seconds: float) -> None:
        """Answer the open call, as if so much time had passed on the probe's clock."""
        count = len(self.calls)
        self.now += seconds
        self.calls[-1].set_result(False)
        await eventually(lambda: len(self.calls) > count)

    async def _call(self) -> bool:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]


async def test_an_overdue_answer_is_a_hang_until_it_comes() -> None:
    engine = Engine(timeout=0.05)
    running = asyncio.create_task(engine.probe.run())
    await eventually(lambda: engine.events)
    assert engine.events[0] == "its engine has not answered for 0.1 s"
    # One call at a time, however long it takes.
    assert len(engine.calls) == 1
    await engine.answer_after(1.0)
    assert engine.events[1] == "answered"
    # What took long because it hung is no measure of a slow step.
    assert engine.probe.limit == 0.05
    running.cancel()


async def test_an_engine_with_long_steps_is_given_more_time() -> None:
    engine = Engine(timeout=10.0)
    running = asyncio.create_task(engine.probe.run())
    await eventually(lambda: engine.calls)
    await engine.answer_after(1.0)
    assert engine.probe.limit == 10.0
    await engine.answer_after(6.0)
    assert engine.probe.limit == 24.0
    assert engine.events == []
    running.cancel()


async def test_one_long_step_does_not_hide_every_later_hang() -> None:
    engine = Engine(timeout=10.0)
    running = asyncio.create_task(engine.probe.run())
    await eventually(lambda: engine.calls)
    await engine.answer_after(9.0)
    for _ in range(150):
        await engine.answer_after(0.001)
    assert engine.probe.limit == 10.0
    running.cancel()


async def test_a_dead_engine_ends_the_probe() -> None:
    engine = Engine(timeout=10.0)
    running = asyncio.create_task(engine.probe.run())
    await eventually(lambda: engine.calls)
    engine.calls[-1].set_exception(ReplicaError("gone"))
    with pytest.raises(ReplicaError, match="gone"):
        await running
    assert engine.events == []
