"""Simulated engines behind real replica servers: the faults that heads must survive, in seconds."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.fakes.conditions import eventually
from tests.sim.drive import answer
from tests.sim.drive import request as sim_request
from tests.sim.protocol.heads import FAST
from tests.sim.protocol.requests import LONG, request
from vllm_omni_plugin.coordinator import OmniCoordClientForHub, OmniCoordinator, ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.replicas.client.remote import AttachSettings, RemoteReplica, attach_remote
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer, ServerSettings
from vllm_omni_plugin.sim.host import EngineHost
from vllm_omni_plugin.sim.sim_launcher import SimLauncher
from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi

FINGERPRINT = {"model": "simulated"}
INTERVAL, TIMEOUT = 0.1, 1.0


class Fleet:
    """A coordinator and the simulated replicas of one node."""

    def __init__(self, launcher: SimLauncher, executor: ThreadPoolExecutor) -> None:
        self.launcher = launcher
        self.coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self.hub = OmniCoordClientForHub(self.coordinator.pub_zmq_addr)
        settings = ServerSettings(
            "127.0.0.1", None, self.coordinator.router_zmq_addr, 0, INTERVAL, TIMEOUT, 5.0, None, FINGERPRINT
        )
        self.servers = [ReplicaServer(settings, launcher, index, EngineApi(), executor) for index in range(2)]
        self.running = [asyncio.create_task(server.run()) for server in self.servers]
        self.attached: list[RemoteReplica] = []
        self.outputs: list[Any] = []
        self.deaths: list[str] = []

    def info(self, index: int) -> ReplicaInfo | None:
        """What the coordinator lists of a replica, if it is up."""
        address = self.servers[index].control_addr
        listed = [info for info in self.hub.get_replica_list().replicas if info.control_addr == address]
        return listed[0] if listed and listed[0].status is ReplicaStatus.UP else None

    async def attach(self, index: int, incarnation_above: int = -1) -> RemoteReplica:
        """Attach to a replica once it is up with a later incarnation than one known."""

        def ready() -> bool:
            info = self.info(index)
            return info is not None and info.incarnation > incarnation_above

        await eventually(ready, f"replica {index} is up")
        info = self.info(index)
        assert info is not None
        settings = AttachSettings(
            {0: EngineApi()}, "test", {0: FINGERPRINT}, INTERVAL, TIMEOUT, context=zmq.Context.instance()
        )
        replica = await attach_remote(
            info, index, settings, lambda outputs: self.outputs.extend(outputs.outputs), lambda status: None
        )
        replica.on_lost = self.deaths.append
        self.attached.append(replica)
        return replica

    def tokens(self, request_id: str) -> list[int]:
        """What one request has been answered."""
        return [token for output in self.outputs if output.request_id == request_id for token in output.new_token_ids]

    async def close(self) -> None:
        """End everything, in order."""
        for replica in self.attached:
            replica.close()
        for server in self.servers:
            server.leave_now("the test is over")
        await asyncio.gather(*self.running)
        self.hub.close()
        self.coordinator.close()


@pytest.fixture
async def fleet(short_path: Path) -> AsyncIterator[Fleet]:
    """Two simulated replicas that a test may attach to."""
    settings = replace(FAST, step_s=0.02)
    with EngineHost() as host, ThreadPoolExecutor(4) as executor:
        fleet = Fleet(SimLauncher(host, settings, lambda index: b"ready", short_path), executor)
        yield fleet
        await fleet.close()


async def test_a_stream_goes_on_elsewhere_token_by_token_when_its_engine_is_killed(fleet: Fleet) -> None:
    first, second = await fleet.attach(0), await fleet.attach(1)
    first.client.add_request(request("a", max_tokens=LONG), "a")
    await eventually(lambda: len(fleet.tokens("a")) >= 3)
    fleet.launcher.processes[0].kill()
    await eventually(lambda: fleet.deaths, "the loss is noticed")
    said = fleet.tokens("a")
    resumed = request("b", max_tokens=LONG - len(said))
    assert resumed.prompt_token_ids is not None
    resumed.prompt_token_ids += said
    second.client.add_request(resumed, "b")
    await eventually(lambda: len(said) + len(fleet.tokens("b")) == LONG)
    assert said + fleet.tokens("b") == answer(sim_request("a", max_tokens=LONG), FAST)
