"""A probe distinguishes a hung engine from a slow one, and marks an engine lost that refuses probes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.virtual_time import VirtualTimeLoop
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine import engine_keeper
from vllm_omni_plugin.replicas.engine.engine_keeper import Probe


class Engine:
    """An engine and its client, answered by the test, with its own clock.

    Attributes:
        ticks: seconds that the clock advances with every reading.
        looks: how often the probe has checked `is_reading`.
    """

    def __init__(self, timeout: float, interval: float = 0.001) -> None:
        self.now = self.ticks = 0.0
        self.is_busy = False
        self.calls: list[asyncio.Future[None]] = []
        self.events: list[str] = []
        self.looks = 0
        self._is_read = True
        self.client = self
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        this: Any = self
        self.prober = Probe(this, interval, timeout, self.events.append, self._answered, self._clock)

    async def _answered(self) -> None:
        self.events.append("answered")

    def mark_lost(self, reason: str) -> None:
        self.lost.set_result(reason)

    @property
    def is_reading(self) -> bool:
        self.looks += 1
        return self._is_read

    @is_reading.setter
    def is_reading(self, is_reading: bool) -> None:
        self._is_read = is_reading

    def _clock(self) -> float:
        self.now += self.ticks
        return self.now

    async def answer_after(self, seconds: float) -> None:
        """Answer the open call after this time on the probe's clock."""
        count = len(self.calls)
        self.now += seconds
        self.calls[-1].set_result(None)
        await eventually(lambda: len(self.calls) > count)

    async def probe(self) -> None:
        self.calls.append(asyncio.get_running_loop().create_future())
        await self.calls[-1]


@asynccontextmanager
async def probed(timeout: float, **fields: Any) -> AsyncIterator[Engine]:
    engine = Engine(timeout)
    for name, value in fields.items():
        setattr(engine, name, value)
    running = asyncio.create_task(engine.prober.run())
    await eventually(lambda: engine.calls)
    yield engine
    running.cancel()


async def test_an_overdue_answer_is_a_hang_until_it_arrives() -> None:
    async with probed(timeout=0.05) as engine:
        await eventually(lambda: engine.events)
        assert engine.events[0] == "its engine has not answered for 0.1 s"
        # One call at a time, however long it takes.
        assert len(engine.calls) == 1
        await engine.answer_after(1.0)
        assert engine.events[1] == "answered"


async def test_the_limit_grows_after_a_hang() -> None:
    async with probed(timeout=0.05) as engine:
        for turn in range(2):
            await eventually(lambda turn=turn: len(engine.events) == 2 * turn + 1)  # type: ignore[misc]
            await engine.answer_after(3600.0)
        # Four times what was given before, not what an hour's sleep of the machine would make of it.
        assert engine.prober.limit == pytest.approx(16 * 0.05)


async def test_a_missing_answer_is_no_hang_while_reading_is_paused() -> None:
    async with probed(timeout=0.01, is_reading=False) as engine:
        await eventually(lambda: engine.looks > 1)
        assert engine.events == []
        engine.is_reading = True
        await eventually(lambda: engine.events)
        assert len(engine.calls) == 1
        await engine.answer_after(60.0)
        assert engine.prober.limit == 0.01


async def test_a_missing_answer_is_no_hang_if_this_process_was_blocked() -> None:
    async with probed(timeout=0.01, ticks=60.0) as engine:
        await eventually(lambda: engine.looks > 1)
        assert engine.events == []
        engine.ticks = 0.0
        await eventually(lambda: engine.events)


def test_time_in_which_the_whole_machine_stood_still_does_not_count() -> None:
    """Engines have stood still, too, as in a snapshot of a virtual machine."""
    paused_s, timeout = 8.0, 10.0

    async def hangs_at(loop: VirtualTimeLoop) -> float:
        engine = Engine(timeout, interval=1.0)
        engine.prober.clock = loop.time
        running = asyncio.create_task(engine.prober.run())

        def stand_still() -> None:
            loop.now += paused_s

        loop.call_later(1.5, stand_still)
        hung = loop.create_future()
        engine.prober.on_hang = hung.set_result
        await hung
        running.cancel()
        return loop.now

    loop = VirtualTimeLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        asked_at = 1.0
        assert runner.run(hangs_at(loop)) >= asked_at + timeout + paused_s


async def test_a_long_call_extends_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_keeper, "LONG_CALL_S", 0.2)
    async with probed(timeout=0.01, is_busy=True) as engine:
        await eventually(lambda: engine.events)
        engine.is_busy = False
        await engine.answer_after(200.0)
        # It says nothing of the engine's steps.
        assert engine.prober.limit == 0.01
        await eventually(lambda: len(engine.events) == 3)
        overdue, waited = "its engine has not answered for 0.0 s", "its engine has not answered for 0.2 s"
        assert engine.events == [waited, "answered", overdue]


async def test_a_long_call_that_is_heard_of_after_the_probe_extends_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_keeper, "LONG_CALL_S", 0.2)
    async with probed(timeout=0.05) as engine:
        engine.is_busy = True
        await eventually(lambda: engine.events)
        assert engine.events == ["its engine has not answered for 0.2 s"]


async def test_long_steps_raise_the_limit_for_some_time() -> None:
    async with probed(timeout=10.0) as engine:
        await engine.answer_after(1.0)
        assert engine.prober.limit == 10.0
        await engine.answer_after(6.0)
        assert engine.prober.limit == 24.0
        assert engine.events == []
        for _ in range(150):
            await engine.answer_after(0.001)
        assert engine.prober.limit == 10.0


async def test_an_engine_that_refuses_a_probe_is_marked_lost() -> None:
    engine = Engine(timeout=10.0)
    running = asyncio.create_task(engine.prober.run())
    await eventually(lambda: engine.calls)
    engine.calls[-1].set_exception(ReplicaError("the executor is gone"))
    assert await running == "its engine cannot be probed: the executor is gone"
    assert engine.events == []


async def test_a_lost_engine_ends_the_probe_at_once() -> None:
    engine = Engine(timeout=10.0, interval=3600.0)
    running = asyncio.create_task(engine.prober.run())
    await asyncio.sleep(0)
    engine.lost.set_result("it exited")
    assert await running == "it exited"
