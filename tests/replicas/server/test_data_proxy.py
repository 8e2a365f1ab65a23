"""The data path of one lease gives everything back, whatever its peers do, and also when it cannot be opened."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_omni_plugin.curve import PLAIN_USERNAME
from vllm_omni_plugin.replicas.links import forwarding
from vllm_omni_plugin.replicas.links.replica_ports import close_all, listen_on_ports
from vllm_omni_plugin.replicas.replica_server.data_proxy import DataProxy
from vllm_omni_plugin.replicas.replica_server.served_engine import InputForwarder
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings

SETTINGS = ServerSettings("127.0.0.1", None, "", 0, 1.0, 1000.0, 60.0, None, {})


def open_proxy(ports: Any, settings: ServerSettings, folder: Path, slot: "zmq.Socket[bytes]") -> DataProxy:
    forwarder = f"ipc://{folder}/forwarder"
    return DataProxy(ports, "c" * 40, settings, lambda: None, forwarder_addr=forwarder, slot_socket=slot)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(f"ipc://{tmp_path}/slot")
    yield socket
    context.destroy(linger=0)


@pytest.fixture
def open_socket() -> Iterator[Callable[[int], "zmq.Socket[bytes]"]]:
    with contextlib.ExitStack() as sockets:

        def open_one(kind: int) -> "zmq.Socket[bytes]":
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
            sockets.callback(socket.close, linger=0)
            return socket

        yield open_one


async def test_a_proxy_that_cannot_be_opened_leaves_nothing_on_the_loop(
    tmp_path: Path, slot: "zmq.Socket[bytes]"
) -> None:
    inputs, outputs = listen_on_ports("127.0.0.1", None, 2)
    outputs.close()
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.closing(inputs), pytest.raises(OSError, match="Bad file descriptor"):
        open_proxy([inputs, outputs], SETTINGS, tmp_path, slot)
    # The slot's own thread may not have noticed yet that its connection is gone.
    slot.context.destroy(linger=0)
    # What earlier tests had may end meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before
    # Descriptors are numbered anew; one that the loop still took for a socket of the proxy would never be heard of.
    loop = asyncio.get_running_loop()
    heard = [asyncio.Event() for _ in range(32)]
    descriptors = [os.eventfd(1) for _ in heard]
    for descriptor, event in zip(descriptors, heard, strict=True):
        loop.add_reader(descriptor, event.set)
    try:
        async with asyncio.timeout(10):
            await asyncio.gather(*(event.wait() for event in heard))
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def fill(writer: "zmq.Socket[bytes]", message: list[bytes], times: int) -> None:
    writer.sndtimeo = 500
    with contextlib.suppress(zmq.Again):
        for _ in range(times):
            writer.send_multipart(message)


async def test_a_proxy_to_a_head_that_does_not_read_closes_at_once_and_leaves_whole_messages_in_the_slot(
    tmp_path: Path, slot: "zmq.Socket[bytes]", open_socket: Callable[[int], "zmq.Socket[bytes]"]
) -> None:
    inputs, outputs = listen_on_ports("127.0.0.1", None, 2)
    proxy = open_proxy([inputs, outputs], SETTINGS, tmp_path, slot)
    head, engine = open_socket(zmq.PULL), open_socket(zmq.PUSH)
    head.rcvhwm = 1
    head.plain_username, head.plain_password = PLAIN_USERNAME.encode(), b"c" * 40
    head.connect(outputs.address)
    engine.connect(f"ipc://{tmp_path}/slot")
    engine.send(b"first")
    assert await asyncio.to_thread(head.poll, 20_000)
    await asyncio.to_thread(fill, engine, [b"outputs", bytes(20_000)], 100_000)
    proxy.close()
    close_all([inputs, outputs])
    # The proxy had read the first frame of a message for which the head had no room.
    assert [slot.recv_multipart()[0] for _ in range(3)] == [b"outputs"] * 3


async def test_a_proxy_closes_at_once_while_the_files_of_an_adapter_are_read(
    tmp_path: Path, slot: "zmq.Socket[bytes]", open_socket: Callable[[int], "zmq.Socket[bytes]"]
) -> None:
    is_reading, was_read = threading.Event(), threading.Event()

    def read_files(frames: Sequence[Any]) -> None:
        is_reading.set()
        was_read.wait(20)

    inputs, outputs = listen_on_ports("127.0.0.1", None, 2)
    settings = replace(SETTINGS, message_filter=read_files)
    proxy = open_proxy([inputs, outputs], settings, tmp_path, slot)
    head = open_socket(zmq.PUSH)
    head.plain_username, head.plain_password = PLAIN_USERNAME.encode(), b"c" * 40
    head.connect(inputs.address)
    head.send_multipart([b"engine", b"add_lora"])
    assert await asyncio.to_thread(is_reading.wait, 20)
    proxy.close()
    assert not was_read.is_set()
    assert not proxy.ended.done()
    was_read.set()
    await proxy.ended
    close_all([inputs, outputs])


def test_the_forwarder_of_an_engine_that_does_not_read_closes_at_once(
    tmp_path: Path, open_socket: Callable[[int], "zmq.Socket[bytes]"]
) -> None:
    forwarder = InputForwarder(f"ipc://{tmp_path}/engine", f"ipc://{tmp_path}/local")
    engine, writer = open_socket(zmq.DEALER), open_socket(zmq.PUSH)
    engine.rcvhwm = 1
    engine.identity = b"engine"
    engine.connect(forwarder.engine_addr)
    engine.send(b"ready")
    assert forwarder.router.poll(20_000)
    assert forwarder.router.recv_multipart()[1] == b"ready"
    forwarder.start()
    writer.connect(forwarder.local_addr)
    fill(writer, [b"engine", bytes(20_000)], 2000)
    assert engine.poll(20_000)
    forwarder.close()


def test_a_false_readable_event_does_not_end_the_forwarding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_proxy, calls = zmq.proxy, []

    def proxy(source: Any, sink: Any) -> None:
        calls.append((source, sink))
        if len(calls) < 3:
            raise zmq.Again
        own_proxy(source, sink)

    monkeypatch.setattr(zmq, "proxy", proxy)
    context = forwarding.forwarding_context()
    outside: zmq.Context[Any] = zmq.Context()
    source, sink = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    source_port, sink_port = source.bind_to_random_port("tcp://127.0.0.1"), sink.bind_to_random_port("tcp://127.0.0.1")
    thread = forwarding.forward("forwarding", source, sink, (source, sink))
    try:
        writer, reader = outside.socket(zmq.PUSH), outside.socket(zmq.PULL)
        writer.connect(f"tcp://127.0.0.1:{source_port}")
        reader.connect(f"tcp://127.0.0.1:{sink_port}")
        writer.send_multipart([b"a", b"b"])
        assert reader.poll(5000)
        assert reader.recv_multipart() == [b"a", b"b"]
    finally:
        outside.destroy(linger=0)
        context.term()
        thread.join(5)
    assert (len(calls), thread.is_alive()) == (3, False)
