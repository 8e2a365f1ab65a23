"""The coordinator checks with real, non-blocking sockets whether it reaches the ports of a node."""

import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes.free_ports import free_port
from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator.client.head_query import answer_with_nonce
from vllm_omni_plugin.coordinator.protocol.head_messages import REACHABILITY_TIMEOUT_S
from vllm_omni_plugin.coordinator.server import reachability_checks
from vllm_omni_plugin.coordinator.server.reachability_checks import ReachabilityChecks
from vllm_omni_plugin.errors import WireError

NODE, OTHER = b"node", b"other"
NONCE = "0123456789abcdef"

Listen = Callable[..., str]


@pytest.fixture
def checks(keep: Keep) -> ReachabilityChecks:
    return keep(ReachabilityChecks())


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Opens ports that send some bytes to each connection, or nothing; returns their addresses."""
    with ExitStack() as stack:

        def listen(sent: bytes | None = None, host: str = "127.0.0.1") -> str:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = stack.enter_context(socket.create_server((host, 0), family=family))
            if sent is not None:
                stack.enter_context(answer_with_nonce([server], sent))
            return f"tcp://[{host}]:{server.getsockname()[1]}" if ":" in host else address(server)

        yield listen


def address(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def result(checks: ReachabilityChecks, now: float = 0.0) -> dict[bytes, dict[str, str]]:
    """The next reports."""
    while True:
        reports = {peer: dict(report.unreached) for peer, report in checks.take_reports(now)}
        if reports:
            return reports
        assert select.select([checks], [], [], 10)[0], "nothing came"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ports_that_send_the_nonce_are_reached(checks: ReachabilityChecks, listen: Listen, host: str) -> None:
    assert checks.begin(NODE, [listen(NONCE.encode(), host=host) for _ in range(3)], NONCE, 0.0)
    assert result(checks) == {NODE: {}}


def test_a_nonce_may_come_in_parts(checks: ReachabilityChecks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert checks.begin(NODE, [address(server)], NONCE, 0.0)
        connection, _ = server.accept()
        with connection:
            connection.sendall(NONCE[:3].encode())
            assert select.select([checks], [], [], 10)[0]
            assert checks.take_reports(0.0) == []
            connection.sendall(NONCE[3:].encode())
            assert result(checks) == {NODE: {}}


@pytest.mark.parametrize(
    "sent", [b"fedcba9876543210", b"", b"0123456789abcdeX", b"\xff\x00"], ids=["another", "nothing", "nearly", "binary"]
)
def test_a_closed_port_and_another_server_at_the_address_are_reported(
    checks: ReachabilityChecks, listen: Listen, sent: bytes
) -> None:
    node, other, closed = listen(NONCE.encode()), listen(sent), f"tcp://127.0.0.1:{free_port()}"
    assert checks.begin(NODE, [node, other, closed], NONCE, 0.0)
    assert result(checks) == {NODE: {other: "something else answers", closed: "Connection refused"}}


def test_an_immediate_connection_error_is_reported_at_once(checks: ReachabilityChecks) -> None:
    # The kernel refuses this at once.
    assert checks.begin(NODE, ["tcp://255.255.255.255:1"], NONCE, 0.0)
    ((_, report),) = checks.take_reports(0.0)
    # The first with no way to other machines, the second with one.
    assert report.unreached["tcp://255.255.255.255:1"] in map(os.strerror, (errno.ENETUNREACH, errno.EACCES))


def test_a_link_local_address_of_an_interface_that_only_the_node_has_is_reported(checks: ReachabilityChecks) -> None:
    address = "tcp://[fe80::1%nosuch0]:1"
    assert checks.begin(NODE, [address], NONCE, 0.0)
    assert result(checks) == {NODE: {address: "Name or service not known"}}


def test_a_lack_of_descriptors_is_reported(checks: ReachabilityChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(reachability_checks.socket, "socket", none_left)
    assert checks.begin(NODE, ["tcp://127.0.0.1:1"], NONCE, 0.0)
    assert result(checks) == {NODE: {"tcp://127.0.0.1:1": "Too many open files"}}


def test_a_silent_port_is_reported_at_its_deadline(checks: ReachabilityChecks, listen: Listen) -> None:
    silent = listen()
    assert checks.begin(NODE, [silent, listen(NONCE.encode())], NONCE, 100.0)
    assert checks.next_deadline() == 100.0 + REACHABILITY_TIMEOUT_S
    assert select.select([checks], [], [], 10)[0]
    assert checks.take_reports(99.9 + REACHABILITY_TIMEOUT_S) == []
    ((peer, report),) = checks.take_reports(100.0 + REACHABILITY_TIMEOUT_S)
    assert (peer, report.unreached) == (NODE, {silent: "no answer within 2 s"})
    assert checks.next_deadline() is None


def test_a_peer_has_one_check_at_a_time(checks: ReachabilityChecks, listen: Listen) -> None:
    port = listen(NONCE.encode())
    assert checks.begin(NODE, [port], NONCE, 0.0)
    assert result(checks) == {NODE: {}}
    assert not checks.begin(NODE, [port], NONCE, 1.0)
    assert checks.begin(OTHER, [port], NONCE, 1.0)
    assert result(checks, 1.0) == {OTHER: {}}
    checks.take_reports(REACHABILITY_TIMEOUT_S)
    assert checks.begin(NODE, [port], NONCE, REACHABILITY_TIMEOUT_S)


def test_connections_of_all_peers_are_bounded(keep: Keep, listen: Listen) -> None:
    checks = keep(ReachabilityChecks(max_connections=3))
    port, other = listen(NONCE.encode()), listen(NONCE.encode())
    assert checks.begin(NODE, [port, other], NONCE, 0.0)
    assert result(checks) == {NODE: {}}
    assert not checks.begin(OTHER, [port, other], NONCE, 1.0)
    checks.take_reports(REACHABILITY_TIMEOUT_S)
    assert checks.begin(OTHER, [port, other], NONCE, REACHABILITY_TIMEOUT_S)


@pytest.mark.parametrize(("places", "addresses", "nonce"), [(0, 1, NONCE), (9, 0, NONCE), (9, 1, "")])
def test_without_connections_addresses_or_a_nonce_there_is_no_check(
    keep: Keep, places: int, addresses: int, nonce: str
) -> None:
    checks = keep(ReachabilityChecks(places))
    assert not checks.begin(NODE, ["tcp://127.0.0.1:1"] * addresses, nonce, 0.0)
    assert (checks.next_deadline(), checks.take_reports(99.0)) == (None, [])


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://head.example:1",
        "127.0.0.1:1",
        "udp://127.0.0.1:1",
        "ipc:///tmp/x",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1",
        "tcp://[fe80::1%\0]:1",
        f"tcp://[fe80::1%{'ü' * 100}]:1",
    ],
)
def test_an_address_that_is_not_numeric_is_refused_before_any_connection(checks: ReachabilityChecks, bad: str) -> None:
    with pytest.raises(WireError, match="expected tcp addresses with numeric hosts"):
        checks.begin(NODE, ["tcp://127.0.0.1:1", bad], NONCE, 0.0)
    assert checks.next_deadline() is None
    assert checks.begin(NODE, ["tcp://127.0.0.1:1"], NONCE, 0.0)
