"""A headless process: its replicas run together and leave together."""

import asyncio
import errno
import os
import resource
import signal
from contextlib import ExitStack

import pytest
import zmq

from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.replicas.machines.group_machine import GroupMachine
from vllm_omni_plugin.replicas.replica_server.node import run_node

HEAD = "tcp://192.0.2.1:5000"


class FakeServer:
    """A replica that does what the test says, and notes what it is told."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.joined = asyncio.Event()
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def run(self) -> None:
        try:
            await self.end
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def drain(self) -> None:
        self.told.put_nowait("drain")

    def stop_now(self, reason: str) -> None:
        self.told.put_nowait(reason)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_the_second_stops(signum: signal.Signals) -> None:
    servers = [FakeServer(), FakeServer()]
    node = asyncio.create_task(run_node(servers, 0, HEAD))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signum)
    assert [await server.told.get() for server in servers] == ["drain", "drain"]
    os.kill(os.getpid(), signum)
    told = [await server.told.get() for server in servers]
    assert told == [f"its node received a second {signum.name}"] * 2
    for server in servers:
        server.end.set_result(None)
    await node


class FakeMachine(GroupMachine):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()

    async def run(self, first_timeout: float) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.told.put_nowait("ended")

    def leave(self) -> None:
        self.told.put_nowait("leave")

    def stop_now(self) -> None:
        self.told.put_nowait("stop")


async def test_a_machine_of_a_group_leaves_at_the_first_signal_and_ends_at_the_second_or_after_its_ranks() -> None:
    servers, machine = [FakeServer(), FakeServer()], FakeMachine()
    node = asyncio.create_task(run_node(servers, 0, HEAD, machine))
    await asyncio.sleep(0)
    for told in ("leave", "stop"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert await machine.told.get() == told
    assert servers[0].told.get_nowait() == "drain"
    servers[0].end.set_result(None)
    await asyncio.sleep(0)
    assert machine.told.empty(), "a rank still computes"
    servers[1].end.set_result(None)
    await node
    assert machine.told.get_nowait() == "ended"


async def test_a_node_ends_with_its_last_replica() -> None:
    servers = [FakeServer(), FakeServer()]
    node = asyncio.create_task(run_node(servers, 0, HEAD))
    servers[0].end.set_result(None)
    await asyncio.sleep(0)
    assert not node.done()
    servers[1].end.set_result(None)
    await node


async def test_a_failed_replica_stops_the_others() -> None:
    servers = [FakeServer(), FakeServer()]
    node = asyncio.create_task(run_node(servers, 0, HEAD))
    await asyncio.sleep(0)
    servers[0].end.set_exception(OmniError("the port is taken"))
    with pytest.raises(OmniError, match="the port is taken"):
        await node
    assert servers[1].cancelled


async def test_a_node_that_never_reaches_the_head_ends_with_an_error() -> None:
    server = FakeServer()
    server.ready.set()
    with pytest.raises(OmniError, match=rf"no head answered at {HEAD} within 0\.01 s.*--omni-join-timeout 0"):
        await run_node([server], 0.01, HEAD)
    assert server.cancelled


async def test_the_join_timeout_starts_when_the_engine_is_ready() -> None:
    server = FakeServer()
    node = asyncio.create_task(run_node([server], 0.01, HEAD))
    await asyncio.wait({node}, timeout=0.05)
    assert not node.done()
    server.joined.set()
    server.ready.set()
    await asyncio.wait({node}, timeout=0.05)
    assert not node.done()
    server.end.set_result(None)
    await node


class ServerWithSockets(FakeServer):
    """A replica that opens sockets of ZMQ's shared context and leaves."""

    def __init__(self, sockets: int) -> None:
        super().__init__()
        self._sockets = sockets

    async def run(self) -> None:
        with ExitStack() as opened:
            for _ in range(self._sockets):
                opened.callback(zmq.Context.instance().socket(zmq.PULL).close)


async def test_a_node_may_open_as_many_sockets_as_its_replicas_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with zmq.Context() as unused:
        monkeypatch.setattr(zmq.Context, "instance", lambda: unused)
        await run_node([ServerWithSockets(30 * 37)], 0, HEAD)


async def test_a_node_may_open_as_many_files_as_its_replicas_need() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        server = FakeServer()
        server.end.set_result(None)
        await run_node([server], 0, HEAD)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 65535)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_replicas_that_need_too_many_files_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    servers = [FakeServer() for _ in range(8)]
    with pytest.raises(
        ConfigError, match=r"8 replicas need some 1264 open files, and this process may have 1024: .*ulimit"
    ):
        await run_node(servers, 0, HEAD)
    assert not any(server.end.done() for server in servers)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), zmq.ZMQError(errno.EMFILE)])
async def test_a_replica_without_descriptors_ends_the_node_with_advice(error: Exception) -> None:
    servers = [FakeServer(), FakeServer()]
    servers[0].end.set_exception(error)
    with pytest.raises(OmniError, match=r"Too many open files: .*ulimit -n"):
        await run_node(servers, 0, HEAD)
    assert servers[1].cancelled
