"""The clients of a replica and of a subscriber."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from coordinator_support import ANY, OpenSocket, eventually, names

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHub,
    OmniCoordClientForStage,
    OmniCoordinator,
    ReplicaInfo,
    ReplicaList,
    ReplicaStatus,
    encode_replica_list,
)
from vllm_omni_plugin.errors import ConfigError, WireError


class FakeCoordinator:
    """A ROUTER that receives the events of an announcing client."""

    def __init__(self, open_socket: OpenSocket) -> None:
        self._router = open_socket(zmq.ROUTER)
        self._router.bind(ANY)
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)

    def receive(self) -> dict[str, Any]:
        _, frame = self._router.recv_multipart()
        received: dict[str, Any] = json.loads(frame)
        return received


@pytest.fixture
def fake_coordinator(open_socket: OpenSocket) -> FakeCoordinator:
    return FakeCoordinator(open_socket)


def stage_client(address: str, interval: float = 1000.0) -> OmniCoordClientForStage:
    return OmniCoordClientForStage(address, "tcp://a:1", "tcp://a:2", 3, heartbeat_interval=interval)


@pytest.fixture
def client(fake_coordinator: FakeCoordinator, keep: Keep) -> OmniCoordClientForStage:
    return keep(stage_client(fake_coordinator.address))


def info(name: str, stage_id: int) -> ReplicaInfo:
    return ReplicaInfo(f"tcp://{name}:1", f"tcp://{name}:2", stage_id, ReplicaStatus.UP, 0, 1.0, 1.0)


def test_a_replica_is_announced_up_at_once_and_each_update_in_order(
    fake_coordinator: FakeCoordinator, client: OmniCoordClientForStage
) -> None:
    client.update_info(status=ReplicaStatus.ERROR)
    client.update_info(queue_length=10)
    first, *later = [fake_coordinator.receive() for _ in range(3)]
    assert [(event["status"], event["queue_length"], event["sequence"]) for event in later] == [
        ("error", 0, 2),
        ("error", 10, 3),
    ]
    assert first.pop("incarnation") > 0
    assert first == {
        "input_addr": "tcp://a:1",
        "output_addr": "tcp://a:2",
        "stage_id": 3,
        "event_type": "update",
        "status": "up",
        "queue_length": 0,
        "sequence": 1,
        "control_addr": "",
        "number": -1,
        "host_slot": "",
        "replica_id": -1,
        "in_use": False,
    }


def test_heartbeats_repeat_the_last_status(fake_coordinator: FakeCoordinator, keep: Keep) -> None:
    client = keep(stage_client(fake_coordinator.address, interval=0.02))
    client.update_info(status=ReplicaStatus.DRAINING, queue_length=4)
    heartbeats = [
        event for event in (fake_coordinator.receive() for _ in range(8)) if event["event_type"] == "heartbeat"
    ]
    assert len(heartbeats) >= 5
    assert (heartbeats[-1]["status"], heartbeats[-1]["queue_length"]) == ("draining", 4)


def test_close_sends_down_and_then_refuses_everything(fake_coordinator: FakeCoordinator) -> None:
    client = stage_client(fake_coordinator.address)
    fake_coordinator.receive()
    client.close()
    received = fake_coordinator.receive()
    assert (received["event_type"], received["status"]) == ("update", "down")
    for refused in (client.close, lambda: client.update_info(queue_length=1)):
        with pytest.raises(RuntimeError):
            refused()


def test_refused_update_leaves_the_last_valid_one(
    fake_coordinator: FakeCoordinator, client: OmniCoordClientForStage
) -> None:
    with pytest.raises(ValueError, match="at least one"):
        client.update_info()
    with pytest.raises(WireError, match="queue_length"):
        client.update_info(queue_length=-1)
    client.update_info(status=ReplicaStatus.UP)
    assert [fake_coordinator.receive()["queue_length"] for _ in range(2)] == [0, 0]


def test_invalid_registration_is_an_error_of_the_constructor() -> None:
    with pytest.raises(WireError, match="stage_id"):
        OmniCoordClientForStage("tcp://127.0.0.1:1", "tcp://a:1", "tcp://a:2", -1)


@pytest.mark.parametrize("address", ["", "nowhere", "tcp://"])
def test_impossible_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot connect"):
        stage_client(address)
    with pytest.raises(ConfigError, match="cannot connect"):
        OmniCoordClientForHub(address)


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan")])
def test_interval_that_is_not_positive_is_refused(interval: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat_interval"):
        stage_client("tcp://127.0.0.1:1", interval=interval)


def test_restarted_replica_counts_as_newer(coordinator: OmniCoordinator) -> None:
    first = stage_client(coordinator.router_zmq_addr)
    eventually(lambda: names(coordinator.get_active_replicas()) == ["a"])
    second = stage_client(coordinator.router_zmq_addr)
    second.update_info(queue_length=5)
    eventually(lambda: coordinator.get_active_replicas().replicas[0].queue_length == 5)
    first.close()
    eventually(lambda: coordinator.invalid_frames["stale"] == 1)
    assert names(coordinator.get_active_replicas()) == ["a"]
    second.close()
    eventually(lambda: names(coordinator.get_active_replicas()) == [])


class FakePublisher:
    """An XPUB that publishes frames of the test to a hub client."""

    def __init__(self, open_socket: OpenSocket, keep: Keep) -> None:
        self._pub = open_socket(zmq.XPUB)
        self._pub.bind(ANY)
        self._keep = keep

    def subscribe(self, on_update: Callable[[ReplicaList], None] | None = None) -> OmniCoordClientForHub:
        hub = self._keep(OmniCoordClientForHub(self._pub.get_string(zmq.LAST_ENDPOINT), on_update))
        assert self._pub.recv() == b"\x01"
        return hub

    def publish(self, *parts: bytes) -> None:
        self._pub.send_multipart(parts)


@pytest.fixture
def publisher(open_socket: OpenSocket, keep: Keep) -> FakePublisher:
    return FakePublisher(open_socket, keep)


def test_hub_filters_by_stage(publisher: FakePublisher) -> None:
    hub = publisher.subscribe()
    assert hub.get_replicas_for_stage(0) == hub.get_replica_list() == ReplicaList([], 0.0)
    publisher.publish(encode_replica_list(ReplicaList([info("a", 0), info("b", 1)], 5.0, no_new_work=[info("c", 1)])))
    eventually(lambda: hub.get_replica_list().timestamp == 5.0)
    assert hub.get_replicas_for_stage(1) == ReplicaList([info("b", 1)], 5.0, no_new_work=[info("c", 1)])
    assert hub.get_replicas_for_stage(7) == ReplicaList([], 5.0)


def test_hub_survives_garbage_and_keeps_its_list(publisher: FakePublisher, caplog: pytest.LogCaptureFixture) -> None:
    hub = publisher.subscribe()
    good = encode_replica_list(ReplicaList([info("a", 0)], 5.0))
    publisher.publish(good)
    eventually(lambda: hub.get_replica_list().timestamp == 5.0)
    for number, parts in enumerate([(b"",), (b"\xff",), (b"[" * 60_000,), (good, good), (good[:-3],), (b"5",)], 1):
        publisher.publish(*parts)
        eventually(lambda expected=number: hub.invalid_frames == expected)  # type: ignore[misc]
    assert hub.get_replica_list().timestamp == 5.0
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    publisher.publish(encode_replica_list(ReplicaList([], 6.0)))
    eventually(lambda: hub.get_replica_list().timestamp == 6.0)


def test_failing_callback_does_not_end_the_hub(publisher: FakePublisher, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []

    def on_update(replicas: ReplicaList) -> None:
        seen.append(replicas.timestamp)
        raise OSError("the head is unwell")

    publisher.subscribe(on_update)
    for timestamp in (1.0, 2.0):
        publisher.publish(encode_replica_list(ReplicaList([], timestamp)))
        eventually(lambda expected=timestamp: seen[-1:] == [expected])  # type: ignore[misc]
    assert seen == [1.0, 2.0]
    assert "A callback of the coordinator's client failed" in caplog.text


def test_a_hub_that_was_closed_cannot_be_closed_again() -> None:
    hub = OmniCoordClientForHub("tcp://127.0.0.1:1")
    hub.close()
    with pytest.raises(RuntimeError):
        hub.close()
