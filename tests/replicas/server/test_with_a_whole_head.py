"""Replica servers, the coordinator and a head's orchestrator together: replicas come, serve, die, drain and go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.replicas.remote_server import RemoteApi
from tests.replicas.server.conftest import FINGERPRINT, Node, StartNode
from vllm_omni_plugin.coordinator import OmniCoordClientForHub, OmniCoordinator
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.fleet_state.session_listener import SessionListener
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaJoined, ReplicaLeft
from vllm_omni_plugin.replicas.client.remote import AttachSettings

SECRET = Secrets(["a secret that both ends know"])


@asynccontextmanager
async def whole_head(coordinator: OmniCoordinator, secrets: Secrets | None = None) -> AsyncIterator[FakeFleet]:
    fleet = FakeFleet(replicas=0, replica_wait=60.0)
    settings = AttachSettings({0: RemoteApi()}, "head", {0: FINGERPRINT}, 0.05, 10.0, secrets)
    fleet.remote = remote = RemoteReplicas(fleet.orchestrator, fleet.fleet_calls, settings)
    async with fleet:
        listener = SessionListener(fleet.orchestrator.rpc_async_queue)
        hub = OmniCoordClientForHub(coordinator.pub_zmq_addr, listener, secrets=secrets)
        try:
            yield fleet
        finally:
            hub.close()
            await remote.close()


async def serving(fleet: FakeFleet, count: int) -> None:
    await eventually(lambda: len(fleet.pool.serving) == count, f"{count} replicas that serve")


@pytest.mark.parametrize("secrets", [None, SECRET], ids=["open", "encrypted"])
async def test_a_replica_joins_a_head_without_replicas_and_gets_the_held_request(
    start_node: StartNode, secrets: Secrets | None
) -> None:
    node = await start_node(secrets=secrets)
    async with whole_head(node.coordinator, secrets) as fleet:
        await fleet.submit("a")
        await serving(fleet, 1)
        await eventually(lambda: node.engine.added)
        node.engine.send_tokens(0, *node.engine.added)
        await eventually(
            lambda: len(fleet.orchestrator.front_end.output_async_queue) == 2, "the news of the replica and an output"
        )
        assert await fleet.read() == [("a", None)]


async def test_a_killed_engine_returns_with_the_next_incarnation(node: Node) -> None:
    async with whole_head(node.coordinator) as fleet:
        await serving(fleet, 1)
        await fleet.submit("a")
        await eventually(lambda: node.engine.added)
        engine = node.engine
        engine.process.kill()
        await eventually(lambda: node.engine is not engine and node.engine.added, "the request on the new engine")


async def test_a_drained_replica_is_removed_without_a_loss(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    async with whole_head(node.coordinator) as fleet:
        await serving(fleet, 1)
        node.server.drain()
        await asyncio.wait_for(node.running, 10)
        await eventually(lambda: not fleet.pool.members)
        await fleet.read()
        assert fleet.changes == [ReplicaJoined(0, 0, b'"ready"'), ReplicaLeft(0, 0)]
    assert "is lost" not in caplog.text


async def test_a_removed_replica_stops(node: Node) -> None:
    async with whole_head(node.coordinator) as fleet:
        await serving(fleet, 1)
        fleet.remote.leave(fleet.pool.members[0])
        await asyncio.wait_for(node.running, 10)
        assert fleet.pool.members == ()
