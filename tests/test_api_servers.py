"""API server processes are kept running one by one, and end together and in order."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fakes.conditions import eventually
from vllm_omni_plugin.errors import OmniError, ReplicaError
from vllm_omni_plugin.integration.processes.api_servers import NOT_ACCEPTING, ApiServerSupervisor, run_until_signal

KILLED = -9
GRACE_S = 30.0


class FakeProcess:
    """A process that does what the test says."""

    def __init__(self, pid: int, obedient: Callable[[], bool]) -> None:
        self.pid = pid
        self.sentinel = os.eventfd(0, os.EFD_CLOEXEC)
        self.exitcode: int | None = None
        self.told_to_end = False
        self.joined = False
        self._obedient = obedient

    def end(self, code: int) -> None:
        if self.exitcode is None:
            self.exitcode = code
            os.eventfd_write(self.sentinel, 1)

    def terminate(self) -> None:
        self.told_to_end = True
        if self._obedient():
            self.end(0)

    def kill(self) -> None:
        self.end(KILLED)

    def join(self) -> None:
        assert self.exitcode is not None, "this would wait"
        self.joined = True


class Supervised:
    """Two API servers under test, whose restarts do not wait unless told to."""

    def __init__(self) -> None:
        self.connections = [NOT_ACCEPTING] * 2
        self.started: list[tuple[int, FakeProcess]] = []
        self.buried: list[tuple[int, int]] = []
        self.delays: list[float] = []
        self.obedient = True
        self.spawning = 0
        self.may_spawn = threading.Event()
        self.may_spawn.set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.servers = ApiServerSupervisor(
            self.connections,
            self._start,
            lambda index, pid: self.buried.append((index, pid)),
            delay=self._delay,
        )
        self.running = asyncio.create_task(self.servers.run())

    def _start(self, index: int) -> FakeProcess:
        assert self.connections[index] == NOT_ACCEPTING
        self.spawning += 1
        assert self.may_spawn.wait(10), "nobody could say so meanwhile"
        self.started.append((index, FakeProcess(100 + len(self.started), lambda: self.obedient)))
        return self.started[-1][1]

    async def _delay(self, seconds: float) -> None:
        self.delays.append(seconds)
        await self.go_on.wait()

    def process(self, index: int) -> FakeProcess:
        return [process for number, process in self.started if number == index][-1]

    async def serve(self, *indexes: int) -> None:
        """Let processes begin to serve, one after the other."""
        for index in indexes:
            await eventually(lambda index=index: any(number == index for number, _ in self.started))
            self.connections[index] = 0

    async def until_spawning(self) -> None:
        """Let both serve, and the first die; its successor is not spawned before `may_spawn`."""
        await self.serve(0, 1)
        self.may_spawn.clear()
        self.process(0).end(KILLED)
        await eventually(lambda: self.spawning == 3)


@pytest.fixture
async def supervised() -> AsyncIterator[Supervised]:
    supervised = Supervised()
    yield supervised
    supervised.may_spawn.set()
    supervised.running.cancel()
    await asyncio.wait([supervised.running])
    for _, process in supervised.started:
        assert process.joined
        os.close(process.sentinel)


async def test_one_that_ends_before_it_served_ends_all(supervised: Supervised) -> None:
    await supervised.serve(0)
    await eventually(lambda: len(supervised.started) == 2)
    supervised.process(1).end(2)
    with pytest.raises(OmniError, match=r"API server 1 \(process 101\) ended with code 2 before it served"):
        await supervised.running
    assert supervised.process(0).exitcode == KILLED


async def test_one_that_does_not_end_in_time_is_killed(supervised: Supervised) -> None:
    supervised.obedient = False
    await supervised.serve(0, 1)
    await supervised.servers.stop(0.3)
    assert [process.exitcode for _, process in supervised.started] == [KILLED, KILLED]
    assert all(process.told_to_end for _, process in supervised.started)


async def test_hurrying_does_not_wait_for_the_time_to_pass(supervised: Supervised) -> None:
    supervised.obedient = False
    await supervised.serve(0)
    stopping = asyncio.create_task(supervised.servers.stop(GRACE_S))
    await eventually(lambda: supervised.process(0).told_to_end)
    supervised.servers.kill()
    await stopping


async def test_all_else_goes_on_while_one_is_being_spawned(supervised: Supervised) -> None:
    await supervised.until_spawning()
    supervised.process(1).end(KILLED)
    await eventually(lambda: supervised.buried == [(0, 100), (1, 101)])
    supervised.may_spawn.set()
    await eventually(lambda: len(supervised.started) == 4)


@pytest.mark.parametrize("in_time", [True, False])
async def test_one_that_is_being_spawned_when_all_are_told_to_end_ends(supervised: Supervised, in_time: bool) -> None:
    await supervised.until_spawning()
    supervised.obedient = in_time
    stopping = asyncio.create_task(supervised.servers.stop(GRACE_S if in_time else 0.01))
    await eventually(lambda: supervised.process(1).exitcode is not None)
    supervised.may_spawn.set()
    await stopping
    await supervised.running
    assert supervised.process(0).exitcode == (0 if in_time else KILLED)
    assert len(supervised.started) == 3


async def test_one_that_is_being_spawned_when_all_is_given_up_is_not_left_behind(supervised: Supervised) -> None:
    await supervised.until_spawning()
    supervised.running.cancel()
    supervised.may_spawn.set()
    await asyncio.wait([supervised.running])
    assert supervised.process(0).exitcode == KILLED
    assert (0, 102) in supervised.buried


async def test_a_signal_goes_to_those_that_serve_alone(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: told.append((pid, signum)))
    await supervised.serve(0)
    await eventually(lambda: len(supervised.started) == 2)

    def is_told() -> bool:
        supervised.servers.signal(signal.SIGHUP)
        return bool(told)

    await eventually(is_told, "that one is known to serve")
    # The other would end of it, as it does not heed it yet.
    assert told == [(supervised.process(0).pid, signal.SIGHUP)]


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
