"""Peers with bad intentions, for `hostile_frames.py`. They run in a process of their own, without vLLM."""

import contextlib
import random
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_omni_plugin.coordinator import ReplicaEvent, ReplicaStatus, encode_event
from vllm_omni_plugin.curve import PLAIN_USERNAME, Secrets, secure_client
from vllm_omni_plugin.replicas.control.lease_messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachRefused,
    Detach,
    FromServer,
    RenewLease,
    decode_from_server,
    encode,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes.hostile_frames import MAX_RANDOM_BYTES, hostile_message, hostile_stream

COORDINATOR_ROLE = "coordinator"
REPLICA_ROLE = "replica"
FRAMES_PER_STREAM = 50
FRAMES_PER_SOCKET = 10_000
FRAMES_PER_SUBSCRIBER = 16
"""Few, because a subscriber to more than a few topics is cut off, and ZMQ drops what a cut one sends without a word."""
HANDSHAKE_MS = 2000
PATIENCE_S = 10.0
UTILITY = b"\x03"
FILLERS_PER_PORT = 8
FILLING = bytes(2**20)
NOWHERE = "tcp://127.0.0.1:1"
"""Port 1 of this machine, where nobody listens."""


SUBSCRIPTIONS = (b"\x01", b"\x00", b"\x01" + bytes(range(256)), b"\x00" + bytes(range(256)))
"""To everything and to a long topic, and the end of both."""


@dataclass(frozen=True)
class Port:
    """One tcp port of a fleet.

    Attributes:
        name: for the table.
        address: ZMQ address.
        kind: type of a ZMQ socket that fits the one behind it.
        role: of the keys that holders of the secret show there; "" where it takes more than the secret.
        samples: valid messages for it.
    """

    name: str
    address: str
    kind: int
    role: str = ""
    samples: tuple[bytes, ...] = (b"\x00" * 16, b"\x80" * 40)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port for a plain connection."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)


@dataclass
class Sent:
    """What one attack on one port came to.

    Attributes:
        in_messages: frames of ZMTP messages, sent after a handshake that succeeded.
        in_streams: frames written to plain connections.
        connections: plain connections made.
        cut: of these, those that ended before all was written.
    """

    in_messages: int = 0
    in_streams: int = 0
    connections: int = 0
    cut: int = 0


def registration(number: int, control_addr: str = NOWHERE) -> bytes:
    """Announce an invented replica of stage 0."""
    address = f"tcp://invented-{number}:1"
    return encode_event(
        ReplicaEvent(address, address, 0, "update", ReplicaStatus.UP, 0, incarnation=1, control_addr=control_addr)
    )


def coordinator_samples() -> tuple[bytes, ...]:
    """Valid announcements of replicas that are not there."""
    return tuple(registration(number) for number in range(4))


def control_samples(fingerprint: dict[str, str], incarnation: int) -> tuple[bytes, ...]:
    """Valid messages of heads; the first would be granted a lease."""
    attach = Attach(PROTOCOL_VERSION, incarnation, "hostile", "c" * 40, fingerprint)
    return tuple(encode(message) for message in (attach, RenewLease(1), Detach(1), RenewLease(2), Detach(2)))


def send_frames(port: Port, frames: int, secret: Path | None, seed: int) -> Sent:
    """Half in messages, as far as the port lets us in, and the rest in plain connections."""
    rng = random.Random(seed)
    sent = Sent()
    secrets = Secrets.from_file(secret) if secret else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    while sent.in_messages < frames // 2:
        most = FRAMES_PER_SUBSCRIBER if port.kind == zmq.XSUB else FRAMES_PER_SOCKET
        wanted = min(most, frames // 2 - sent.in_messages)
        accepted = _send_messages(context, port, wanted, secrets, rng)
        sent.in_messages += accepted
        if accepted < wanted:
            break
    context.term()
    while sent.in_messages + sent.in_streams < frames:
        stream = hostile_stream(rng, FRAMES_PER_STREAM)
        sent.connections += 1
        try:
            with socket.create_connection(port.endpoint, PATIENCE_S) as connection:
                connection.sendall(stream)
        except ConnectionRefusedError:
            raise RuntimeError(f"nobody listens at {port.name} any more") from None
        except OSError:
            sent.cut += 1
        sent.in_streams += FRAMES_PER_STREAM if len(stream) > MAX_RANDOM_BYTES else 1
    return sent


def fill_before_handshake(ports: Sequence[tuple[str, int]], seconds: float, seed: int) -> tuple[int, int]:
    """Begin frames of any size and write as much of them as is taken; return connections made and MiB written."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    made, written = 0, 0
    while time.monotonic() < until:
        with contextlib.ExitStack() as opened:
            begun = [_begin_frame(opened, rng, endpoint) for endpoint in ports for _ in range(FILLERS_PER_PORT)]
            made += len(begun)
            going_on = {connection for connection in begun if connection is not None}
            while going_on and time.monotonic() < until:
                for connection in list(going_on):
                    try:
                        written += connection.send(FILLING)
                    except BlockingIOError:
                        continue
                    except OSError:
                        going_on.discard(connection)
    return made, written // 2**20


def _begin_frame(opened: contextlib.ExitStack, rng: random.Random, endpoint: tuple[str, int]) -> socket.socket | None:
    mechanism = rng.choice((b"CURVE", b"CURVE", b"PLAIN", b"NULL")).ljust(20, b"\0")
    size = rng.choice((2**62, 500 * 2**20, 200 * 2**10))
    try:
        connection = opened.enter_context(socket.create_connection(endpoint, timeout=PATIENCE_S))
        connection.setblocking(False)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism + bytes(32)
        connection.send(greeting + b"\x06" + size.to_bytes(8, "big"))
    except OSError:
        return None
    return connection


def stay_half_open(ports: Sequence[Port], count: int, seconds: float) -> int:
    """Open so many connections to each port and say nothing; return how many the other end has ended by then."""
    connections = []
    for port in ports:
        for _ in range(count):
            with contextlib.suppress(TimeoutError):
                connections.append(socket.create_connection(port.endpoint, PATIENCE_S))
    deadline = time.monotonic() + seconds
    poll = select.poll()
    for connection in connections:
        connection.setblocking(False)
        poll.register(connection, select.POLLIN)
    ended: set[int] = set()
    by_number = {connection.fileno(): connection for connection in connections}
    while len(ended) < len(connections) and (left := deadline - time.monotonic()) > 0:
        for number, _ in poll.poll(left * 1000):
            if _is_over(by_number[number]):
                poll.unregister(number)
                ended.add(number)
    for connection in connections:
        connection.close()
    return len(ended)


def register_many(coordinator: str, count: int, secret: Path | None) -> None:
    """Announce so many invented replicas."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = _connected(context, Port("", coordinator, zmq.DEALER, COORDINATOR_ROLE), secret)
    for number in range(count):
        dealer.send(registration(number))
    dealer.close()
    context.term()


def subscribe_and_sleep(publisher: str, subscribers: int, seconds: float, secret: Path | None) -> None:
    """Subscribe to the lists and read none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = Port("", publisher, zmq.SUB, COORDINATOR_ROLE)
    for _ in range(subscribers):
        _connected(context, port, secret, rcvhwm=1, rcvbuf=4096).subscribe(b"")
    time.sleep(seconds)
    context.destroy(linger=0)


def ask_and_sleep(control_addr: str, questions: int, secret: Path | None) -> None:
    """Ask a replica server without end, and read no answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = _connected(context, Port("", control_addr, zmq.DEALER, REPLICA_ROLE), secret, rcvhwm=1, rcvbuf=4096)
    for number in range(questions):
        dealer.send(encode(RenewLease(number)))
    context.destroy(linger=1000)


def attach_and_sleep(control_addr: str, attach: Attach, secret: Path | None, calls: int) -> tuple[float, str]:
    """Attach, let the engine say a lot, read nothing of it, and go on beating.

    Returns:
        Seconds until the lease was over, and what the server said then.
    """
    guest = Guest(control_addr, attach, secret, rcvhwm=1, rcvbuf=4096)
    began = time.monotonic()
    guest.wait_until_connected()
    guest.call(0, "set_weight_version", "x" * 10_000)
    for number in range(calls):
        with contextlib.suppress(zmq.Again):
            guest.call(number, "get_weight_version")
    while not (over := guest.beat()) and time.monotonic() - began < 60:
        time.sleep(0.2)
    guest.close()
    return time.monotonic() - began, over


class Guest:
    """A second head, with a lease of its own. Not for several threads.

    Args:
        control_addr: of the replica's server.
        attach: what to ask for; the credential is put in.
        secret: file, if there is one.
        options: of the socket for outputs.

    Raises:
        RuntimeError: the server refuses.
    """

    def __init__(self, control_addr: str, attach: Attach, secret: Path | None, **options: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = _connected(self._context, Port("", control_addr, zmq.DEALER, REPLICA_ROLE), secret)
        self._keys = zmq.curve_keypair()
        attach = msgspec.structs.replace(attach, credential=self._keys[0].decode())
        self.lease = self._attach(attach)
        self._inputs = self._data_socket(zmq.PUSH, self.lease.input_addr)
        self._outputs = self._data_socket(zmq.PULL, self.lease.output_addr, **options)
        self.answers = 0

    def wait_until_connected(self) -> None:
        """Return once calls can be sent, after up to ten seconds. Raises RuntimeError if they cannot."""
        if not self._inputs.poll(10_000, zmq.POLLOUT):
            raise RuntimeError("the input port does not take this head's connection")

    def call(self, number: int, method: str, *args: str) -> None:
        """Call a method of the engine. Raises `zmq.Again` when it cannot be sent now."""
        payload = msgspec.msgpack.encode((self.lease.client_index, number, method, args))
        self._inputs.send_multipart([self.lease.identity, UTILITY, payload], zmq.NOBLOCK)

    def beat(self) -> str:
        """Say that we are here; return why the lease is over, or ""."""
        self._control.send(encode(RenewLease(self.lease.lease)))
        while self._control.poll(0):
            answer: Any = decode_from_server(self._control.recv())
            if getattr(answer, "status", None) is not ReplicaStatus.UP:
                return str(getattr(answer, "reason", "") or "expired")
        return ""

    def count_answers(self) -> None:
        """Count the engine's answers that have come."""
        while self._outputs.poll(0):
            self._outputs.recv_multipart()
            self.answers += 1

    def close(self) -> None:
        """Go without a word."""
        self._context.destroy(linger=0)

    def _attach(self, attach: Attach) -> Attached:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._control.send(encode(attach))
            if not self._control.poll(PATIENCE_S * 1000):
                raise RuntimeError("the server does not answer")
            answer: FromServer = decode_from_server(self._control.recv())
            if isinstance(answer, Attached):
                return answer
            assert isinstance(answer, AttachRefused)
            if answer.lasting or time.monotonic() > deadline:
                raise RuntimeError(answer.reason)
            time.sleep(0.1)

    def _data_socket(self, kind: int, address: str, **options: int) -> "zmq.Socket[bytes]":
        data_socket = self._context.socket(kind)
        if self.lease.data_key:
            data_socket.curve_publickey, data_socket.curve_secretkey = self._keys
            data_socket.curve_serverkey = self.lease.data_key.encode()
        else:
            data_socket.plain_username = PLAIN_USERNAME.encode()
            data_socket.plain_password = self._keys[0]
        for name, value in options.items():
            setattr(data_socket, name, value)
        data_socket.connect(address)
        return data_socket


def _send_messages(context: Any, port: Port, frames: int, secrets: Secrets | None, rng: random.Random) -> int:
    """Send over one socket, at least so many frames if there is a connection; return how many."""
    sender = context.socket(port.kind)
    # An XSUB drops what it cannot send; others shall not take messages while there is no connection.
    sender.immediate = port.kind != zmq.XSUB
    sender.sndtimeo = HANDSHAKE_MS
    monitor = sender.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    if port.role:
        secure_client(sender, secrets, port.role)
    sender.connect(port.address)
    sent = 0
    with contextlib.suppress(zmq.ZMQError):
        while sent < frames and (sent or monitor.poll(HANDSHAKE_MS)):
            message = hostile_message(rng, port.samples)
            sender.send_multipart(message)
            sent += len(message)
    sender.disable_monitor()
    monitor.close()
    sender.close(linger=HANDSHAKE_MS)
    return sent


def _connected(context: Any, port: Port, secret: Path | None, **options: int) -> Any:
    peer = context.socket(port.kind)
    secure_client(peer, Secrets.from_file(secret) if secret else None, port.role)
    for name, value in options.items():
        setattr(peer, name, value)
    peer.connect(port.address)
    return peer


def _is_over(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
