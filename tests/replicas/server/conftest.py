"""Fixtures: a running replica server with its coordinator."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.keeping import Keep
from tests.replicas.remote_head import RemoteHead
from tests.replicas.remote_server import RemoteApi
from tests.replicas.server.engines import ServedFakeEngine, ServedFakeLauncher
from tests.replicas.server.heads import Head
from vllm_omni_plugin.coordinator import OmniCoordinator, ReplicaInfo
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.engine.engine_keeper import FirstStarts
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings

FINGERPRINT = {"model": "tiny", "dtype": "float32"}


class Node:
    """One replica server under test. Its clock is `late` seconds ahead."""

    late = 0.0

    def __init__(
        self,
        settings: ServerSettings,
        launcher: ServedFakeLauncher,
        coordinator: OmniCoordinator,
        first_starts: FirstStarts | None,
    ) -> None:
        self.settings = settings
        self.launcher = launcher
        self.coordinator = coordinator
        self.executor = ThreadPoolExecutor(2)
        self.delays: list[float] = []
        self.server = ReplicaServer(
            settings,
            launcher,
            0,
            RemoteApi(),
            self.executor,
            first_starts=first_starts,
            delay=self._delay,
            clock=lambda: time.monotonic() + self.late,
        )
        self.running = asyncio.create_task(self.server.run())

    async def _delay(self, seconds: float) -> None:
        self.delays.append(seconds)

    @property
    def engine(self) -> ServedFakeEngine:
        return self.launcher.engines[-1]

    @property
    def info(self) -> ReplicaInfo | None:
        """The replica in the list, or None if it is not UP."""
        replicas = self.coordinator.get_active_replicas().replicas
        return replicas[0] if replicas else None

    async def up(self, *, after: int = 0) -> ReplicaInfo:
        """The replica once it is UP with a later incarnation than `after`."""

        def info() -> ReplicaInfo | None:
            assert not self.running.done(), self.running
            return self.info if self.info is not None and self.info.incarnation > after else None

        return await eventually(info, "an announced replica")

    @asynccontextmanager
    async def attached(self, slot: int | None = None) -> AsyncIterator[Head]:
        info = await self.up()
        async with self.head() as head:
            await head.attach(info.incarnation, slot)
            yield head

    def head(self, **other: Any) -> Head:
        return Head(self.server.control_addr, dict(FINGERPRINT), **({"secrets": self.settings.secrets} | other))


StartNode = Callable[..., Awaitable[Node]]


@pytest.fixture
def socket_folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(short_path))
    return short_path


@pytest.fixture
def launcher(socket_folder: Path, keep: Keep) -> ServedFakeLauncher:
    return keep(ServedFakeLauncher())


@pytest.fixture
async def start_node(launcher: ServedFakeLauncher) -> AsyncIterator[StartNode]:
    nodes: list[Node] = []

    async def start(*, launcher_fails: int = 0, first_starts: FirstStarts | None = None, **other: Any) -> Node:
        launcher.failing = launcher_fails
        secrets: Secrets | None = other.get("secrets")
        coordinator = OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secrets=secrets)
        settings = ServerSettings(
            host="127.0.0.1",
            ports=None,
            coordinator_addr=coordinator.router_zmq_addr,
            stage_id=0,
            heartbeat_interval=0.05,
            heartbeat_timeout=10.0,
            drain_timeout=60.0,
            secrets=secrets,
            fingerprint=FINGERPRINT,
            message_filter=lambda frames: None,
        )
        nodes.append(Node(replace(settings, **other), launcher, coordinator, first_starts))
        return nodes[-1]

    yield start
    for node in nodes:
        node.running.cancel()
        await asyncio.wait([node.running])
        node.executor.shutdown()
        node.coordinator.close()


@pytest.fixture
async def node(start_node: StartNode) -> Node:
    return await start_node()


@pytest.fixture
async def head(node: Node) -> AsyncIterator[Head]:
    async with node.attached() as head:
        yield head


MakeHead = Callable[..., RemoteHead]


@pytest.fixture
def make_head(keep: Keep) -> MakeHead:
    def make(secrets: Secrets | None = None, max_message_bytes: int = 2**30) -> RemoteHead:
        return keep(RemoteHead(RemoteApi(), FINGERPRINT, secrets=secrets, max_message_bytes=max_message_bytes))

    return make
