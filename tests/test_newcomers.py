"""Connections that send too much before they are let in, also where descriptors are used again."""

import socket
import time
from collections.abc import Callable

from vllm_omni_plugin.curve.newcomers import MAX_HANDSHAKE_BYTES, Newcomers


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"


def test_a_connection_is_watched_although_its_descriptor_was_told_of_before_at_another_port() -> None:
    newcomers = Newcomers()
    with (
        socket.create_server(("127.0.0.1", 0)) as own,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(own.getsockname()) as client,
        own.accept()[0] as server,
    ):
        for listening in (other, own):
            newcomers.add(server.fileno(), f"tcp://127.0.0.1:{listening.getsockname()[1]}", 100)
        client.sendall(bytes(MAX_HANDSHAKE_BYTES + 1))
        eventually(lambda: newcomers.end_the_greedy() == [server.fileno()])
        client.settimeout(20)
        assert client.recv(1) == b""
    newcomers.close()
