"""Checks whether this machine reaches the ports of a node that asks, with non-blocking connections."""

import ipaddress
import os
import select
import socket
from dataclasses import dataclass, field
from errno import EINPROGRESS

from vllm_omni_plugin.coordinator.protocol.head_messages import REACHABILITY_TIMEOUT_S, ReachabilityReport
from vllm_omni_plugin.errors import WireError

MAX_CONNECTIONS = 256
"""In `REACHABILITY_TIMEOUT_S`, for all nodes together."""


@dataclass
class _Check:
    """The check of one node. ``unreached``: the reason by address."""

    nonce: bytes
    # After this time, addresses without an answer count as not reached.
    ends_at: float
    # Number of connections, and of those without a result.
    connections: int
    waiting: int
    unreached: dict[str, str] = field(default_factory=dict)
    is_reported: bool = False


@dataclass
class _Connection:
    check: _Check
    address: str
    socket: socket.socket
    received: bytes = b""


class ReachabilityChecks:
    """Connects to addresses of nodes. An address is reached if it sends the node's nonce, so no other server counts.

    In `REACHABILITY_TIMEOUT_S`, a peer gets one check, and all peers together get ``max_connections``. Times are
    monotonic seconds.
    """

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self._max_connections = max_connections
        # By peer, in the order in which they end.
        self._checks: dict[bytes, _Check] = {}
        self._connections: dict[int, _Connection] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return the descriptor that is readable when a connection has received something."""
        return self._epoll.fileno()

    def begin(self, peer: bytes, addresses: list[str], nonce: str, now: float) -> bool:
        """Start a check; return whether there will be a report. Raises `WireError` if an address is not numeric tcp."""
        targets = {address: _target(address) for address in addresses}
        begun = sum(check.connections for check in self._checks.values())
        if not (targets and nonce) or peer in self._checks or begun + len(targets) > self._max_connections:
            return False
        check = self._checks[peer] = _Check(nonce.encode(), now + REACHABILITY_TIMEOUT_S, len(targets), len(targets))
        for address, (family, host, port) in targets.items():
            try:
                connection = _Connection(check, address, socket.socket(family, socket.SOCK_STREAM))
            except OSError as error:
                check.waiting -= 1
                check.unreached[address] = str(error.strerror)
                continue
            connection.socket.setblocking(False)
            self._connections[connection.socket.fileno()] = connection
            try:
                error_number = connection.socket.connect_ex((host, port))
                if error_number in (0, EINPROGRESS):
                    self._epoll.register(connection.socket, select.EPOLLIN)
                else:
                    self._end(connection, os.strerror(error_number))
            except OSError as error:
                # A link-local address names a network interface of the node, which this machine may not have.
                self._end(connection, str(error.strerror))
        return True

    def next_deadline(self) -> float | None:
        """Return the next time at which `take_reports` has something to do."""
        return next((check.ends_at for check in self._checks.values()), None)

    def take_reports(self, now: float) -> list[tuple[bytes, ReachabilityReport]]:
        """Read what was received, and return the reports of finished checks, by peer."""
        if not self._checks:
            return []
        for descriptor, _ in self._epoll.poll(0):
            self._read(self._connections[descriptor])
        for connection in list(self._connections.values()):
            if connection.check.ends_at <= now:
                self._end(connection, f"no answer within {REACHABILITY_TIMEOUT_S:g} s")
        finished = {peer: check for peer, check in self._checks.items() if not (check.waiting or check.is_reported)}
        for check in finished.values():
            check.is_reported = True
        self._checks = {peer: check for peer, check in self._checks.items() if check.ends_at > now}
        return [(peer, ReachabilityReport(check.unreached)) for peer, check in finished.items()]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._epoll.close()

    def _read(self, connection: _Connection) -> None:
        nonce = connection.check.nonce
        try:
            data = connection.socket.recv(len(nonce))
        except OSError as error:
            self._end(connection, str(error.strerror))
            return
        connection.received += data
        if connection.received == nonce:
            self._end(connection)
        elif not data or not nonce.startswith(connection.received):
            self._end(connection, "something else answers")

    def _end(self, connection: _Connection, why_unreached: str = "") -> None:
        del self._connections[connection.socket.fileno()]
        # This also removes the socket from the epoll.
        connection.socket.close()
        connection.check.waiting -= 1
        if why_unreached:
            connection.check.unreached[connection.address] = why_unreached


def _target(address: str) -> tuple[int, str, int]:
    """Return family, host and port. Host names are refused, because a lookup blocks."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        numeric = ipaddress.ip_address(host.strip("[]"))
        if scheme == "tcp" and 0 < int(port) < 2**16 and rest.isascii() and rest.isprintable():
            return (socket.AF_INET6 if numeric.version == 6 else socket.AF_INET), str(numeric), int(port)
    except ValueError:
        pass
    raise WireError(f"listening: expected tcp addresses with numeric hosts, got {address!r}")
