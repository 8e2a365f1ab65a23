"""What the operator of a node is told while no head listens."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.conditions import eventually
from vllm_omni_plugin.coordinator import OmniCoordinator
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.server.announcer import Announcer
from vllm_omni_plugin.replicas.server.server_settings import ServerSettings

ADDRESSES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")


def settings(coordinator: OmniCoordinator) -> ServerSettings:
    return ServerSettings("127.0.0.1", None, coordinator.router_zmq_addr, 3, 1.0, 10.0, 60.0, None, {})


async def test_a_refused_secret_is_logged_with_the_address_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secrets=Secrets(["the secret of the head"]))
    joined = asyncio.Event()
    with ThreadPoolExecutor(1) as executor, caplog.at_level(logging.WARNING):
        announcer = Announcer(settings(coordinator), ADDRESSES, joined)
        await eventually(lambda: "cannot be reached" in caplog.text)
        assert coordinator.router_zmq_addr in caplog.text
        assert "--omni-secret-file" in caplog.text
        assert not joined.is_set()
        await announcer.close(executor)
    coordinator.close()
