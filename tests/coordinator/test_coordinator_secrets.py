"""A fleet with a secret: admitted and refused peers, their error messages, and the rotation of a secret."""

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from coordinator_support import ANY, eventually, free_address, make_event, names

from tests.fakes.keeping import Keep
from tests.fakes.secret_files import write_secret
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHub,
    OmniCoordClientForStage,
    OmniCoordinator,
    OmniCoordinatorRuntime,
    ReplicaList,
)
from vllm_omni_plugin.coordinator.client import coordinator_link as link_module
from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink
from vllm_omni_plugin.coordinator.protocol import coordinator_sockets
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import connect_watched, open_dealer
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError

OLD_LINE, NEW_LINE = "the old secret of the fleet", "the new secret of the fleet"
OLD, NEW = Secrets([OLD_LINE]), Secrets([NEW_LINE])
OLD_THEN_NEW, NEW_THEN_OLD = Secrets([OLD_LINE, NEW_LINE]), Secrets([NEW_LINE, OLD_LINE])

OpenCoordinator = Callable[..., OmniCoordinator]
OpenReplica = Callable[..., OmniCoordClientForStage]


@pytest.fixture
def serve(keep: Keep) -> OpenCoordinator:
    """Open coordinators that are closed at the end."""
    return lambda secrets, router=ANY: keep(OmniCoordinator(router, ANY, 1000.0, secrets=secrets))


@pytest.fixture
def report(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> OpenReplica:
    """Open announcing clients that are closed at the end, soon even if the coordinator refuses them."""
    monkeypatch.setattr(link_module, "CLOSE_GRACE", 0.1)

    def report(
        address: str, secrets: Secrets | None, name: str = "a", on_unreachable: Callable[[str], None] | None = None
    ) -> OmniCoordClientForStage:
        client = OmniCoordClientForStage(
            address,
            f"tcp://{name}:1",
            f"tcp://{name}:2",
            0,
            heartbeat_interval=0.2,
            control_addr=f"tcp://{name}:3",
            secrets=secrets,
            on_unreachable=on_unreachable,
        )
        return keep(client)

    return report


def follow_until(address: str, secrets: Secrets | None, expected: list[str]) -> ReplicaList:
    hub = OmniCoordClientForHub(address, secrets=secrets)
    eventually(lambda: names(hub.get_replica_list()) == expected)
    hub.close()
    return hub.get_replica_list()


@pytest.mark.parametrize(
    ("served", "held"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(OLD, OLD, id="one"),
        pytest.param(OLD, OLD_THEN_NEW, id="replica knows the next"),
        pytest.param(OLD, NEW_THEN_OLD, id="replica prefers the next"),
        pytest.param(OLD_THEN_NEW, OLD, id="head knows the next"),
        pytest.param(OLD_THEN_NEW, NEW_THEN_OLD, id="replica is ahead"),
        pytest.param(NEW_THEN_OLD, OLD_THEN_NEW, id="head is ahead"),
        pytest.param(NEW_THEN_OLD, NEW, id="replica forgot the old"),
    ],
)
def test_replica_and_subscriber_with_the_served_secret_connect(
    serve: OpenCoordinator, report: OpenReplica, served: Secrets | None, held: Secrets | None
) -> None:
    coordinator = serve(served)
    problems: list[str] = []
    replica = report(coordinator.router_zmq_addr, held, on_unreachable=problems.append)
    (listed,) = follow_until(coordinator.pub_zmq_addr, held, ["a"]).replicas
    assert listed.control_addr == "tcp://a:3"
    assert listed.incarnation == replica.incarnation
    assert replica.connected
    assert problems == [""]


def test_a_client_without_a_free_descriptor_for_its_next_attempt_tries_again(
    serve: OpenCoordinator, report: OpenReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = serve(OLD)
    attempts: list[int] = []

    def connect(socket: zmq.Socket[bytes], address: str, secrets: Secrets, attempt: int) -> zmq.Socket[bytes]:
        attempts.append(attempt)
        if len(attempts) == 2:
            raise zmq.ZMQError(errno.EMFILE)
        return connect_watched(socket, address, secrets, attempt)

    monkeypatch.setattr(coordinator_sockets, "connect_watched", connect)
    problems: list[str] = []
    report(coordinator.router_zmq_addr, NEW_THEN_OLD, on_unreachable=problems.append)
    eventually(lambda: names(coordinator.get_active_replicas()) == ["a"])
    assert attempts == [0, 1, 1]
    assert problems == [f"cannot connect to {coordinator.router_zmq_addr}: Too many open files", ""]


@pytest.mark.parametrize(
    ("served", "held", "why"),
    [
        pytest.param(OLD, NEW, "serves without one, or with one that is not in the file", id="another"),
        pytest.param(OLD, None, "seems to demand one, and none was given", id="missing"),
        pytest.param(None, OLD, "serves without one, or with one that is not in the file", id="needless"),
        pytest.param(OLD_THEN_NEW, NEW, "serves without one, or with one that is not in the file", id="too early"),
    ],
)
def test_replica_with_a_wrong_secret_is_refused_with_the_reason(
    serve: OpenCoordinator, report: OpenReplica, served: Secrets | None, held: Secrets | None, why: str
) -> None:
    coordinator = serve(served)
    problems: list[str] = []
    stranger = report(coordinator.router_zmq_addr, held, "stranger", problems.append)
    listener = OmniCoordClientForHub(coordinator.pub_zmq_addr, secrets=held)
    eventually(lambda: problems)
    note = "" if held is None else " (without that flag, links on loopback use a secret of the user)"
    refusal = f"refused secret: it {why} {'here' if held is None else 'given here'} with --omni-secret-file{note}"
    (problem,) = problems
    # The coordinator may end the connection before this end has noticed why.
    assert problem.removesuffix(refusal) in (
        f"cannot join the coordinator at {coordinator.router_zmq_addr}: ",
        f"cannot join the coordinator at {coordinator.router_zmq_addr}: it ended the connection in the handshake; "
        "if that goes on: ",
    )
    assert not stranger.connected
    coordinator.add_new_replica(make_event("a"))
    follow_until(coordinator.pub_zmq_addr, served, ["a"])
    assert listener.get_replica_list().timestamp == 0.0
    listener.close()


@pytest.mark.parametrize(
    ("served", "held"),
    [
        pytest.param(OLD, NEW, id="another"),
        pytest.param(OLD, None, id="missing"),
        pytest.param(None, OLD, id="needless"),
    ],
)
def test_refused_link_sleeps_until_its_next_attempt(
    serve: OpenCoordinator, served: Secrets | None, held: Secrets | None
) -> None:
    coordinator = serve(served)
    problems: list[str] = []
    link = CoordinatorLink(coordinator.router_zmq_addr, open_dealer, held, problems.append)
    refused_by = time.monotonic() + 20.0
    while not problems and time.monotonic() < refused_by:
        link.wait(refused_by, 0)
    wakeups = 0
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        link.wait(deadline, 0)
        wakeups += 1
    link.close()
    assert len(problems) == 1
    assert wakeups < 40


def test_absence_refusal_and_loss_of_the_coordinator_are_reported_and_repaired(
    serve: OpenCoordinator, report: OpenReplica
) -> None:
    address = free_address()
    problems: list[str] = []
    replica = report(address, OLD, on_unreachable=problems.append)
    eventually(lambda: problems == [f"no coordinator answers at {address}"])
    with closing(OmniCoordinator(address, ANY, secrets=NEW)):
        eventually(lambda: "refused secret" in problems[-1])
    with closing(OmniCoordinator(address, ANY, secrets=OLD)) as first:
        eventually(lambda: names(first.get_active_replicas()) == ["a"])
        assert (problems[-1], replica.connected) == ("", True)
        problems.clear()
    eventually(lambda: problems)
    assert problems[0] == f"the connection to the coordinator at {address} was lost"
    assert not replica.connected
    second = serve(OLD, address)
    eventually(lambda: names(second.get_active_replicas()) == ["a"])
    eventually(lambda: problems[-1] == "")


def test_failing_callback_does_not_end_the_client(
    serve: OpenCoordinator, report: OpenReplica, caplog: pytest.LogCaptureFixture
) -> None:
    def on_unreachable(reason: str) -> None:
        raise OSError("the replica is unwell")

    coordinator = serve(OLD)
    report(coordinator.router_zmq_addr, OLD, on_unreachable=on_unreachable)
    eventually(lambda: names(coordinator.get_active_replicas()) == ["a"])
    assert "A callback of the coordinator's client failed" in caplog.text


def test_restarted_process_has_the_secret_and_no_list_loses_a_replica(tmp_path: Path, report: OpenReplica) -> None:
    runtime = OmniCoordinatorRuntime(heartbeat_timeout=3.0, secret_file=write_secret(tmp_path / "secret", OLD_LINE))
    lists: list[list[str]] = []
    hub = OmniCoordClientForHub(runtime.pub_address, lambda replicas: lists.append(names(replicas)), secrets=OLD)
    clients = [report(runtime.router_address, OLD, name) for name in "ab"]
    eventually(lambda: lists[-1:] == [["a", "b"]])
    killed, seen = runtime.process_id, len(lists)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: runtime.process_id not in (None, killed))
    clients[0].update_info(queue_length=9)
    eventually(lambda: [info.queue_length for info in hub.get_replica_list().replicas] == [9, 0])
    assert all(listed == ["a", "b"] for listed in lists[seen:])
    hub.close()
    runtime.close()


def test_arguments_and_environment_contain_neither_the_secret_nor_its_path(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "secret", OLD_LINE)
    runtime = OmniCoordinatorRuntime(secret_file=path)
    visible = Path(f"/proc/{runtime.process_id}/cmdline").read_bytes()
    visible += Path(f"/proc/{runtime.process_id}/environ").read_bytes()
    runtime.close()
    assert path.encode() not in visible
    assert OLD_LINE.encode() not in visible


def test_process_with_a_bad_secret_file_is_a_config_error(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "secret", OLD_LINE, mode=0o644)
    with pytest.raises(ConfigError, match=r"argument --omni-secret-file: .*chmod 600"):
        OmniCoordinatorRuntime(secret_file=path)


def test_lists_are_published_on_loopback_only() -> None:
    runtime = OmniCoordinatorRuntime(host="0.0.0.0")
    assert runtime.router_address.startswith("tcp://0.0.0.0:")
    assert runtime.pub_address.startswith("tcp://127.0.0.1:")
    runtime.close()
