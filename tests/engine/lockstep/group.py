"""The replica servers of a lockstep group, on the test's own loop."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import zmq
from vllm.v1.executor import Executor

from tests.contract.configs import vllm_config
from tests.engine.experts import RANKS
from tests.fakes.conditions import eventually
from vllm_omni_plugin.coordinator import OmniCoordinator, ReplicaInfo
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.launch.group_launch import new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch.spawning import NodeShare

from .executor import EXECUTOR, additional_config
from .heads import FINGERPRINT

NUMBERS = range(5, 5 + RANKS)
"""Of the ranks, in the fleet."""
_START_S = 120.0


class HeadlessGroup:
    """The replica servers of one group on this loop, with the coordinator they announce themselves to.

    Attributes:
        pids: processes that were started for it, in order.
        steps_folder: see `steps`.
    """

    def __init__(self, launcher: Any, pids: list[int], steps_folder: Path) -> None:
        self.pids = pids
        self.steps_folder = steps_folder
        self.launcher = launcher
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._coordinator = OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self._executor = ThreadPoolExecutor(2 * RANKS)
        settings = ServerSettings(
            host="127.0.0.1",
            ports=None,
            coordinator_addr=self._coordinator.router_zmq_addr,
            stage_id=0,
            heartbeat_interval=0.2,
            heartbeat_timeout=30.0,
            drain_timeout=60.0,
            secrets=None,
            fingerprint=FINGERPRINT,
        )
        self.servers = [ReplicaServer(settings, launcher, rank, EngineApi(), self._executor) for rank in range(RANKS)]
        self.running = [asyncio.create_task(server.run()) for server in self.servers]

    async def up(self, after: int = 0) -> list[ReplicaInfo]:
        """The ranks in their order once all are announced as UP, under later incarnations than `after`."""

        def ranks() -> list[ReplicaInfo] | None:
            assert not any(task.done() for task in self.running), self.running
            replicas = self._coordinator.get_active_replicas().replicas
            by_address = {info.control_addr: info for info in replicas if info.incarnation > after}
            return [by_address[server.control_addr] for server in self.servers] if len(by_address) == RANKS else None

        return await eventually(ranks, "all ranks", _START_S)

    async def close(self) -> None:
        for server in self.servers:
            server.stop_now("the test is over")
        async with asyncio.timeout(_START_S):
            await asyncio.gather(*self.running)
        self._executor.shutdown()
        self._coordinator.close()
        self.context.term()

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if runs(pid)]


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def headless_group(model: Path, folder: Path) -> AsyncIterator[HeadlessGroup]:
    """A group of lockstep ranks behind replica servers, once all of it serves."""
    config = vllm_config(
        model,
        data_parallel_size=RANKS,
        distributed_executor_backend=EXECUTOR,
        max_model_len=512,
        additional_config=additional_config(folder),
    )
    engine_config, _ = split_ranks(config)
    pids: list[int] = []
    launcher = new_launcher(
        engine_config,
        Executor.get_class(engine_config),
        True,
        share=NodeShare(0, RANKS),
        on_spawn=pids.append,
        report_cache=True,
        numbers=NUMBERS,
    )
    group = HeadlessGroup(launcher, pids, folder)
    try:
        await group.up()
        yield group
    finally:
        await group.close()
