"""The live coordinator over real sockets."""

import itertools
import socket
import threading
from contextlib import closing, suppress

import pytest
import zmq
from coordinator_support import ANY, ManualClock, SharedClock, eventually, make_event, names

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHub,
    OmniCoordinator,
    ReplicaList,
)
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import CoordinatorSockets
from vllm_omni_plugin.coordinator.state import list_deltas
from vllm_omni_plugin.errors import ConfigError, WireError


@pytest.mark.parametrize("busy_one", ["router", "pub"])
def test_busy_port_is_a_config_error_naming_the_address(busy_one: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        router, pub = (address, ANY) if busy_one == "router" else (ANY, address)
        with pytest.raises(ConfigError, match=address):
            OmniCoordinator(router, pub)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat_timeout"):
        OmniCoordinator(ANY, ANY, timeout)


def test_invalid_local_event_is_the_callers_error(coordinator: OmniCoordinator) -> None:
    with pytest.raises(WireError, match="queue_length"):
        coordinator.add_new_replica(make_event(queue_length=-1))
    assert coordinator.get_active_replicas().replicas == []


def test_late_subscriber_is_sent_the_list_without_any_change(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    # The keep-alive would bring the list as well.
    monkeypatch.setattr(list_deltas, "KEEP_ALIVE_INTERVAL", 1000.0)
    coordinator = keep(OmniCoordinator(ANY, ANY, 1000.0))
    coordinator.add_new_replica(make_event("a"))
    for _ in range(3):
        late = keep(OmniCoordClientForHub(coordinator.pub_zmq_addr))
        eventually(lambda late=late: names(late.get_replica_list()) == ["a"])  # type: ignore[misc]


def test_burst_of_updates_is_coalesced_and_ends_with_the_last(keep: Keep) -> None:
    clock = SharedClock()
    coordinator = keep(OmniCoordinator(ANY, ANY, clock=clock, wall_clock=clock.wall))
    timestamps: list[float] = []
    hub = keep(OmniCoordClientForHub(coordinator.pub_zmq_addr, lambda replicas: timestamps.append(replicas.timestamp)))
    eventually(lambda: timestamps)
    for queue_length in range(1, 3001):
        coordinator.update_replica_info(make_event("a", queue_length=queue_length))
    eventually(lambda: [info.queue_length for info in hub.get_replica_list().replicas] == [3000])
    assert all(later - earlier > 0.09 for earlier, later in itertools.pairwise(timestamps))


class Slowly:
    """A coordinator for which time passes only here, with a replica "a" and a head that is subscribed."""

    def __init__(self, keep: Keep, heartbeat_timeout: float) -> None:
        self.clock = ManualClock()
        self.coordinator = keep(
            OmniCoordinator(ANY, ANY, heartbeat_timeout, clock=self.clock, wall_clock=self.clock.wall)
        )
        heard = threading.Event()
        self.hub = keep(OmniCoordClientForHub(self.coordinator.pub_zmq_addr, lambda replicas: heard.set()))

        def subscribed() -> bool:
            self.clock.now += 0.125
            self.coordinator.publish_replica_list_update()
            return heard.wait(0.05)

        eventually(subscribed)
        self.coordinator.add_new_replica(make_event("a"))

    def advance(self, seconds: float) -> ReplicaList:
        """Let time pass and return the list that the coordinator publishes then."""
        self.clock.now += seconds
        self.coordinator.publish_replica_list_update()
        eventually(lambda: self.hub.get_replica_list().timestamp == self.clock.now)
        return self.hub.get_replica_list()


def test_publish_reports_whether_the_list_goes_out_at_once() -> None:
    with closing(OmniCoordinator(ANY, ANY, clock=ManualClock())) as coordinator:
        assert coordinator.publish_replica_list_update()
        # Once that list is out, and no time passes, the next one has to wait.
        eventually(lambda: not coordinator.publish_replica_list_update())
    assert not coordinator.publish_replica_list_update()


def test_late_coordinator_expires_no_replica(keep: Keep) -> None:
    slowly = Slowly(keep, 30.0)
    slowly.advance(1.0)
    assert names(slowly.advance(10_000.0)) == ["a"]


def test_a_long_sleep_does_not_count_as_lateness(keep: Keep) -> None:
    slowly = Slowly(keep, 30.0)
    # Requests that come long after the last list must not excuse the silent.
    published = [slowly.advance(2.5) for _ in range(7)]
    assert [len(replicas.replicas) for replicas in published] == [1] * 5 + [0] * 2


def test_wait_for_shutdown_ends_with_close() -> None:
    coordinator = OmniCoordinator(ANY, ANY)
    waiter = threading.Thread(target=coordinator.wait_for_shutdown)
    waiter.start()
    assert waiter.is_alive()
    coordinator.close()
    waiter.join(20)
    assert not waiter.is_alive()


def test_wait_for_loop_pass_blocks_while_the_thread_hangs() -> None:
    goes_on = threading.Event()
    goes_on.set()

    def clock() -> float:
        if threading.current_thread().name == "omni-coordinator":
            goes_on.wait()
        return 0.0

    coordinator = OmniCoordinator(ANY, ANY, clock=clock)
    coordinator.wait_for_loop_pass()
    goes_on.clear()
    waiter = threading.Thread(target=coordinator.wait_for_loop_pass)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    goes_on.set()
    waiter.join(20)
    assert not waiter.is_alive()
    coordinator.close()
    coordinator.wait_for_loop_pass()


def test_closed_coordinator_refuses_everything_but_reading() -> None:
    coordinator = OmniCoordinator(ANY, ANY)
    coordinator.add_new_replica(make_event("a"))
    coordinator.close()
    for refused in (coordinator.close, lambda: coordinator.add_new_replica(make_event("b"))):
        with pytest.raises(RuntimeError):
            refused()
    assert names(coordinator.get_active_replicas()) == ["a"]


def test_close_returns_while_heads_that_read_nothing_disconnect() -> None:
    # Each round hung once in 15 while an endpoint lingered for ever.
    for _ in range(30):
        sockets = CoordinatorSockets("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", None)
        heads: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heads.linger = 0
        peers = [heads.socket(zmq.DEALER) for _ in range(8)]
        for peer in peers:
            peer.rcvhwm = 1
            peer.rcvbuf = 5000
            peer.connect(sockets.router_address)
            peer.send(b"")
        for _ in peers:
            identity, _ = sockets.router.recv_multipart()
            with suppress(zmq.Again):
                for _ in range(300):
                    sockets.router.send_multipart([identity, bytes(60000)], zmq.NOBLOCK)
        leaver = threading.Thread(target=heads.destroy)
        leaver.start()
        closer = threading.Thread(target=sockets.close, daemon=True)
        closer.start()
        closer.join(30)
        assert not closer.is_alive()
        leaver.join()
