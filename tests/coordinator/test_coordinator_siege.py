"""Hostile peers on both ports, with and without the secret: the service goes on and the neighbour notices nothing."""

import contextlib
import random
import socket

import pytest
import zmq
from coordinator_support import ANY, OpenDealer, OpenSocket, Socket, eventually, make_event, names

from tests.fakes.hostile_frames import hostile_message, hostile_stream
from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHub,
    OmniCoordClientForStage,
    OmniCoordinator,
    ReplicaStatus,
    encode_event,
)
from vllm_omni_plugin.coordinator.protocol import coordinator_sockets as sockets_module
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import MAX_TOPICS_PER_PEER, ROLE
from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason
from vllm_omni_plugin.curve import Secrets, secure_client

SECRETS = Secrets(["a secret that the hostile may hold"])
SAMPLES = [encode_event(make_event("stranger", status=status, queue_length=7, sequence=3)) for status in ReplicaStatus]
FRAMES = 5000
# Much less than libzmq's 30 s, which a test would not wait for.
HANDSHAKE_MS = 1500
FRAMES_PER_STREAM = 50
# ZMTP 2.0 (RFC 15): signature, revision, a DEALER without an identity; and a message.
OLD_GREETING = b"\xff" + bytes(8) + b"\x7f\x01\x05" + bytes(2)
OLD_MESSAGE = b"\x00\x03bad"
HALF_A_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"


class Fleet:
    """A coordinator with a secret, one well-behaved replica and one head."""

    def __init__(self, keep: Keep) -> None:
        self.coordinator = keep(OmniCoordinator(ANY, ANY, heartbeat_timeout=1000.0, secrets=SECRETS))
        self.hub = keep(OmniCoordClientForHub(self.coordinator.pub_zmq_addr, secrets=SECRETS))
        address = self.coordinator.router_zmq_addr
        self.neighbour = keep(
            OmniCoordClientForStage(address, "tcp://neighbour:1", "tcp://neighbour:2", 0, secrets=SECRETS)
        )
        self.queue_length = 0
        self.check()

    def check(self) -> None:
        """Return once a change of the neighbour has reached the head."""
        self.queue_length += 1
        self.neighbour.update_info(ReplicaStatus.UP, self.queue_length)
        eventually(lambda: self.listed_queue_length() == self.queue_length)

    def listed_queue_length(self) -> int | None:
        """Return the neighbour's queue length as the head knows it."""
        known = {info.input_addr: info.queue_length for info in self.hub.get_replica_list().replicas}
        return known.get("tcp://neighbour:1")


@pytest.fixture
def fleet(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(sockets_module, "LINK_CHECK_MS", HANDSHAKE_MS)
    return Fleet(keep)


def insider(open_socket: OpenSocket, kind: int, address: str) -> Socket:
    """Return a connected peer that holds the secret and takes in one message at a time."""
    peer = open_socket(kind)
    peer.rcvhwm = 1
    secure_client(peer, SECRETS, ROLE)
    peer.connect(address)
    return peer


def tcp_connection(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_hostile_events_of_a_holder_of_the_secret(fleet: Fleet, open_socket: OpenSocket) -> None:
    rng = random.Random(3)
    peers = [insider(open_socket, zmq.DEALER, fleet.coordinator.router_zmq_addr) for _ in range(3)]
    for _ in range(FRAMES):
        rng.choice(peers).send_multipart(hostile_message(rng, SAMPLES))
    for peer in peers:
        peer.send(SAMPLES[0])
    fleet.check()
    eventually(lambda: all(fleet.coordinator.invalid_frames[reason] > 100 for reason in ("malformed", "multipart")))


def test_hostile_frames_on_the_pub_socket_from_a_holder_of_the_secret(fleet: Fleet, open_socket: OpenSocket) -> None:
    rng = random.Random(4)
    peers = [insider(open_socket, zmq.XSUB, fleet.coordinator.pub_zmq_addr) for _ in range(3)]
    for _ in range(FRAMES):
        frames = hostile_message(rng, SAMPLES)
        # Of these most are subscriptions to something.
        rng.choice(peers).send_multipart([b"\x01" + frames[0], *frames[1:]] if rng.random() < 0.7 else frames)
    fleet.check()


@pytest.mark.parametrize("port", ["router", "pub"])
def test_hostile_bytes_of_a_peer_without_the_secret(fleet: Fleet, port: str) -> None:
    rng = random.Random(5)
    address = getattr(fleet.coordinator, f"{port}_zmq_addr")
    for _ in range(FRAMES // FRAMES_PER_STREAM):
        with tcp_connection(address) as connection:
            try:
                connection.sendall(hostile_stream(rng, FRAMES_PER_STREAM))
            except OSError:
                continue  # Disconnected before all was sent.
    fleet.check()
    assert set(fleet.coordinator.invalid_frames.values()) == {0}
    assert [info.input_addr for info in fleet.coordinator.get_active_replicas().replicas] == ["tcp://neighbour:1"]


def test_peer_with_the_protocol_of_an_old_libzmq_changes_nothing(
    coordinator: OmniCoordinator, dealer: OpenDealer
) -> None:
    with tcp_connection(coordinator.router_zmq_addr) as connection:
        connection.sendall(OLD_GREETING + OLD_MESSAGE)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    dealer(coordinator.router_zmq_addr).send(encode_event(make_event("after")))
    eventually(lambda: names(coordinator.get_active_replicas()) == ["after"])
    assert coordinator.invalid_frames["malformed"] == 0


def test_half_open_connections_are_ended_and_disturb_nobody(fleet: Fleet) -> None:
    ports = (fleet.coordinator.router_zmq_addr, fleet.coordinator.pub_zmq_addr)
    connections = [tcp_connection(address) for address in ports for _ in range(20)]
    for connection in connections[::2]:
        connection.sendall(HALF_A_GREETING)
    fleet.check()
    for connection in connections:
        connection.settimeout(20)
        while connection.recv(4096):
            pass
        connection.close()


def test_subscriber_that_reads_nothing_delays_no_other(fleet: Fleet, open_socket: OpenSocket) -> None:
    slow = insider(open_socket, zmq.SUB, fleet.coordinator.pub_zmq_addr)
    slow.subscribe(b"")
    for number in range(2500):
        # Long lists, so that what the slow one leaves unread fills every buffer on the way to it.
        fleet.coordinator.add_new_replica(make_event(f"{'x' * 200}{number}"))
    for _ in range(24):
        fleet.check()


def test_registration_storm_is_bounded_and_displaces_nobody(fleet: Fleet, open_socket: OpenSocket) -> None:
    peer = insider(open_socket, zmq.DEALER, fleet.coordinator.router_zmq_addr)
    for number in range(5_000):
        peer.send(encode_event(make_event(f"invented{number}", stage_id=number % 1024)))
    eventually(lambda: fleet.coordinator.invalid_frames["table-full"] == 5_000 - 4095)
    assert len(fleet.coordinator.get_active_replicas().replicas) == 4096
    fleet.check()
    fleet.neighbour.update_info(ReplicaStatus.DRAINING)
    eventually(lambda: fleet.listed_queue_length() is None)
    fleet.neighbour.update_info(new_incarnation=True)
    fleet.check()


def test_only_a_subscriber_to_too_many_topics_is_disconnected(fleet: Fleet, open_socket: OpenSocket) -> None:
    modest, greedy = (insider(open_socket, zmq.XSUB, fleet.coordinator.pub_zmq_addr) for _ in range(2))
    monitors = [peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) for peer in (modest, greedy)]
    try:
        for peer in (modest, greedy):
            for number in range(MAX_TOPICS_PER_PEER):
                peer.send(b"\x01topic %d" % number)
        greedy.send(b"\x01one more")
        assert monitors[1].poll(20_000)
        assert fleet.coordinator.invalid_frames["topics"]
        fleet.check()
        assert not monitors[0].poll(0)
    finally:
        for peer, monitor in zip((modest, greedy), monitors, strict=True):
            peer.disable_monitor()
            monitor.close()


def test_topics_of_a_closed_connection_do_not_count_for_the_next_one(fleet: Fleet, open_socket: OpenSocket) -> None:
    for _ in range(3):
        peer = insider(open_socket, zmq.XSUB, fleet.coordinator.pub_zmq_addr)
        for number in range(MAX_TOPICS_PER_PEER - 1):
            peer.send(b"\x01topic %d" % number)
        # Lists begin so: when one comes, all before has been handled.
        peer.send(b"\x01{")
        assert peer.poll(20_000)
        peer.close(linger=0)
        fleet.check()
    assert not fleet.coordinator.invalid_frames["topics"]


def test_oversized_frame_ends_only_its_own_connection(coordinator: OmniCoordinator, dealer: OpenDealer) -> None:
    neighbour = dealer(coordinator.router_zmq_addr)
    neighbour.send(encode_event(make_event("neighbour", queue_length=1)))
    eventually(lambda: names(coordinator.get_active_replicas()) == ["neighbour"])
    flooder = dealer(coordinator.router_zmq_addr)
    flooder.send(b"x" * 10_000_000)
    flooder.send(encode_event(make_event("reconnected")))
    eventually(lambda: names(coordinator.get_active_replicas()) == ["neighbour", "reconnected"])
    # Cut at the socket: had the frame come through, it would have been counted.
    assert coordinator.invalid_frames["malformed"] == 0
    neighbour.send(encode_event(make_event("neighbour", queue_length=2)))
    eventually(lambda: coordinator.get_active_replicas().replicas[0].queue_length == 2)


def test_number_of_logged_peers_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropLog(max_peers=3)
    for number in range(100):
        drops.record(DropReason.MALFORMED, f"peer{number}", "bad")
    assert len(caplog.records) == 4
    assert drops.counts["malformed"] == 100


def test_frame_content_cannot_break_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    DropLog().record(DropReason.MALFORMED, "10.0.0.1", "bad\nERROR forged line")
    assert "\n" not in caplog.text.rstrip("\n")
