"""What the operator of a node is told while no head listens."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.conditions import eventually
from vllm_omni_plugin.coordinator import OmniCoordinator, query_head
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.replica_server.announcer import Announcer
from vllm_omni_plugin.replicas.replica_server.server_settings import ReplicaIdentity, ServerSettings

IDENTITY = ReplicaIdentity(7, "node/3")
ADDRESSES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")


def settings(coordinator: OmniCoordinator) -> ServerSettings:
    return ServerSettings("127.0.0.1", None, coordinator.router_zmq_addr, 3, 1.0, 10.0, 60.0, None, {})


async def test_a_refused_secret_is_logged_with_the_address_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secrets=Secrets(["the secret of the head"]))
    joined = asyncio.Event()
    with ThreadPoolExecutor(1) as executor, caplog.at_level(logging.WARNING):
        announcer = Announcer(settings(coordinator), ADDRESSES, IDENTITY, joined)
        await eventually(lambda: "cannot be reached" in caplog.text)
        assert coordinator.router_zmq_addr in caplog.text
        assert "--omni-secret-file" in caplog.text
        assert not joined.is_set()
        await announcer.close(executor)
    coordinator.close()


async def test_a_replica_announces_what_it_keeps_over_restarts() -> None:
    coordinator = OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    with ThreadPoolExecutor(1) as executor:
        announcer = Announcer(settings(coordinator), ADDRESSES, IDENTITY, asyncio.Event())
        await eventually(lambda: coordinator.get_active_replicas().replicas)
        info = query_head(coordinator.router_zmq_addr, 3, None, host_slots=["node/3", "node/4"]).info
        assert info is not None
        assert info.numbers == (7, 0)
        await announcer.close(executor)
    coordinator.close()
