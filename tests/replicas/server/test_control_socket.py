"""The control link takes whatever comes, counts what is no message, and logs it once per peer."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from functools import partial

import pytest
import zmq

from tests.fakes.conditions import eventually
from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.replicas.control.control_link import ControlServer
from vllm_omni_plugin.replicas.control.lease_messages import RenewLease, Status, ToServer, encode
from vllm_omni_plugin.replicas.links.replica_ports import Listener, listen_on_ports


def has(items: list[bytes], count: int) -> bool:
    return len(items) == count


@pytest.fixture
def listener(keep: Keep) -> Listener:
    (listener,) = listen_on_ports("127.0.0.1", None, 1)
    return keep(listener)


@pytest.fixture
def dealer(listener: Listener) -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(listener.address)
        yield dealer
    context.term()


async def test_garbage_is_counted_and_logged_once(
    listener: Listener, dealer: "zmq.Socket[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[ToServer] = []
    control = ControlServer(listener, None, lambda peer, message: heard.append(message))
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            dealer.send(b"no message")
            dealer.send_multipart([b"one", b"too many"])
        dealer.send(encode(RenewLease(1)))
        await eventually(lambda: heard == [RenewLease(1)])
    assert (control.dropped["malformed"], control.dropped["multipart"]) == (50, 50)
    assert len([record for record in caplog.records if "Dropped a frame" in record.message]) == 2
    control.close(0.0)


async def test_a_peer_of_an_older_protocol_is_counted_like_any_other(listener: Listener) -> None:
    control = ControlServer(listener, None, lambda peer, message: None)
    host, port = listener.address.removeprefix("tcp://").split(":")
    signature, revision, dealer, anonymous = b"\xff" + bytes(8) + b"\x7f", b"\x01", b"\x05", b"\x00\x00"
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(signature + revision + dealer + anonymous + b"\x00\x03bad")
        await eventually(lambda: control.dropped["malformed"] == 1)
    control.close(0.0)


async def test_the_connection_of_a_peer_that_is_silent_is_closed(listener: Listener) -> None:
    control = ControlServer(listener, None, lambda peer, message: None, timeout=0.2)
    host, port = listener.address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    # The whole handshake of ZMTP 3.1 (RFC 37).
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    writer.write(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
    async with asyncio.timeout(10):
        while await reader.read(65536):
            pass
    writer.close()
    control.close(0.0)


async def test_an_error_in_handling_a_message_does_not_stop_later_ones(
    listener: Listener, dealer: "zmq.Socket[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[ToServer] = []

    def fail_first(peer: bytes, message: ToServer) -> None:
        heard.append(message)
        if len(heard) == 1:
            raise RuntimeError("a bug")

    control = ControlServer(listener, None, fail_first)
    dealer.send(encode(RenewLease(1)))
    dealer.send(encode(RenewLease(2)))
    await eventually(lambda: heard == [RenewLease(1), RenewLease(2)])
    assert "could not be handled" in caplog.text
    control.close(0.0)


async def test_a_message_that_arrives_during_a_send_is_read(listener: Listener, dealer: "zmq.Socket[bytes]") -> None:
    heard: list[bytes] = []
    control = ControlServer(listener, None, lambda peer, message: heard.append(peer))
    dealer.send(encode(RenewLease(0)))
    await eventually(lambda: heard)
    for turn in range(300):
        dealer.send(encode(RenewLease(turn)))
        # The event of the message that is on its way may be taken in by the send.
        for _ in range(3):
            control.send(heard[0], Status(1, ReplicaStatus.UP))
        await eventually(partial(has, heard, turn + 2))
    control.close(0.0)
