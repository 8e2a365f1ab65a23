"""Fixtures of the coordinator's tests."""

import os
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq
from coordinator_support import ANY, eventually

from vllm_omni_plugin.coordinator import OmniCoordClientForHub, OmniCoordinator


def _held() -> tuple[int, int, int]:
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    return descriptors, threads, len(psutil.Process().children())


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every test gives back its sockets, threads and processes."""
    before = _held()
    yield
    eventually(lambda: _held() <= before and all(now <= then for now, then in zip(_held(), before, strict=True)))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Sockets of the test's own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def dealer(context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[str], zmq.Socket[bytes]]:
    """Open a peer that sends whatever it likes."""

    def open_dealer(address: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.sndtimeo = 20_000
        socket.connect(address)
        return socket

    return open_dealer


@pytest.fixture
def coordinator() -> Iterator[OmniCoordinator]:
    """A live one, in which nothing expires by itself."""
    coordinator = OmniCoordinator(ANY, ANY, heartbeat_timeout=1000.0)
    yield coordinator
    coordinator.close()


@pytest.fixture
def hub(coordinator: OmniCoordinator) -> Iterator[OmniCoordClientForHub]:
    """A head following it, known to be subscribed."""
    hub = OmniCoordClientForHub(coordinator.pub_zmq_addr)
    assert hub.wait_for_update(0, 20)
    yield hub
    hub.close()
