"""Fixtures of the coordinator's tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from coordinator_support import ANY, OpenDealer, OpenSocket, Socket, eventually, read_if_there

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import OmniCoordClientForHub, OmniCoordinator


def _held() -> tuple[int, int, int]:
    children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in read_if_there(task).split()]
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    return descriptors, threads, len(children)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every test gives back its sockets, threads and processes."""
    before = _held()
    yield
    eventually(lambda: all(now <= then for now, then in zip(_held(), before, strict=True)))


@pytest.fixture
def open_socket() -> Iterator[OpenSocket]:
    """Open sockets of the test's own, closed at its end."""
    context: zmq.Context[Socket] = zmq.Context()
    opened: list[Socket] = []

    def open_socket(kind: int) -> Socket:
        socket = context.socket(kind)
        socket.linger = 0
        socket.sndtimeo = socket.rcvtimeo = 20_000
        opened.append(socket)
        return socket

    yield open_socket
    for socket in opened:
        socket.close()
    context.term()


@pytest.fixture
def dealer(open_socket: OpenSocket) -> OpenDealer:
    """Open a peer that sends whatever it likes."""

    def open_dealer(address: str) -> Socket:
        socket = open_socket(zmq.DEALER)
        socket.connect(address)
        return socket

    return open_dealer


@pytest.fixture
def coordinator(keep: Keep) -> OmniCoordinator:
    """A live one, in which nothing expires by itself."""
    return keep(OmniCoordinator(ANY, ANY, heartbeat_timeout=1000.0))


@pytest.fixture
def hub(coordinator: OmniCoordinator, keep: Keep) -> OmniCoordClientForHub:
    """A head following it, known to be subscribed."""
    hub = keep(OmniCoordClientForHub(coordinator.pub_zmq_addr))
    eventually(lambda: hub.get_replica_list().timestamp > 0)
    return hub
