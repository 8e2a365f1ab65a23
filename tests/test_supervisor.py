"""The order in which a process with several API servers ends."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from tests.fakes.conditions import eventually
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.processes.api_servers import run_until_signal

TIMEOUT_S = 7.0
TOLD = ["replica is the last", "replica is the last", "heads told"]


class FakeHeads:
    """API servers that end when the test says so."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.end = asyncio.Event()
        self.running = False

    async def run(self) -> None:
        self.running = True
        try:
            await self.end.wait()
        finally:
            self.running = False
            self._events.append("heads ended")

    async def stop(self, timeout: float) -> None:
        assert timeout > TIMEOUT_S
        self._events.append("heads told")
        await self.end.wait()

    def kill(self) -> None:
        self._events.append("heads killed")
        self.end.set()


class FakeReplica:
    """A replica that ends when it is told to."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        try:
            await self.end
        finally:
            self._events.append("replica ended")

    def disable_restarts(self) -> None:
        self._events.append("replica is the last")

    def stop_now(self, reason: str) -> None:
        if not self.end.done():
            self.end.set_result(None)


class Process:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.heads = FakeHeads(self.events)
        self.replicas = [FakeReplica(self.events) for _ in range(2)]
        self.running = asyncio.create_task(run_until_signal(self.heads, self.replicas, TIMEOUT_S))


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    process = Process()
    await eventually(lambda: process.heads.running)
    yield process
    process.running.cancel()
    await asyncio.wait([process.running])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_replicas_end_after_the_api_servers_that_use_them(process: Process, signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    await eventually(lambda: process.events == TOLD)
    process.heads.end.set()
    await process.running
    assert process.events == [*TOLD, "heads ended", "replica ended", "replica ended"]


async def test_a_second_signal_waits_for_no_request(process: Process) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: process.events == TOLD)
    os.kill(os.getpid(), signal.SIGTERM)
    await process.running
    assert process.events[:4] == [*TOLD, "heads killed"]


async def test_a_replica_that_cannot_start_ends_all(process: Process) -> None:
    process.replicas[1].end.set_exception(ReplicaError("the engine did not start"))
    with pytest.raises(ReplicaError, match="the engine did not start"):
        await process.running
    assert sorted(process.events) == ["heads ended", "replica ended", "replica ended"]


async def test_a_replica_that_leaves_ends_nothing_else(process: Process) -> None:
    process.replicas[0].end.set_result(None)
    await eventually(lambda: process.events == ["replica ended"])
    assert not process.running.done()
