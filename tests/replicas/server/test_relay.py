"""The data path of one lease gives everything back, also when it cannot be opened."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from vllm_omni_plugin.replicas.ports import close_all, listen_on_many
from vllm_omni_plugin.replicas.relay import Relay


@pytest.fixture
def slot(tmp_path: Path) -> Iterator["zmq.Socket[bytes]"]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(f"ipc://{tmp_path}/slot")
    yield socket
    socket.close(linger=0)


async def test_a_relay_that_cannot_be_opened_leaves_nothing_on_the_loop(
    tmp_path: Path, slot: "zmq.Socket[bytes]"
) -> None:
    inputs, outputs = listen_on_many("127.0.0.1", None, 2)
    outputs.close()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        Relay(inputs, outputs, f"ipc://{tmp_path}/hub", slot, "c" * 40, None, 10.0, lambda: None)
    assert set(os.listdir("/proc/self/fd")) == before
    # Descriptors are numbered anew; one that the loop still took for a socket of the relay would never be heard of.
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
        close_all([inputs])
