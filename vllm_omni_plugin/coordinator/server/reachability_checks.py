"""Whether this machine reaches the ports on which a node listens that asks: tried by connections that never block."""

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
class _Trial:
    """What is tried for one node.

    Attributes:
        nonce: what the node says to who connects.
        ends_at: when what was not answered counts as not reached.
        connections: how many were begun.
        waiting: how many of them have no result yet.
        unreached: why, by address.
        is_told: whether the node was sent the result.
    """

    nonce: bytes
    ends_at: float
    connections: int
    waiting: int
    unreached: dict[str, str] = field(default_factory=dict)
    is_told: bool = False


@dataclass
class _Connection:
    """One that has no result yet; `heard` is what came on it."""

    trial: _Trial
    address: str
    socket: socket.socket
    heard: bytes = b""


class ReachabilityChecks:
    """Connects where nodes say that they listen. An address is reached if the nonce of its node comes from there, so
    that nothing else that answers counts. Times are monotonic seconds given by the caller.

    A peer gets one check in `REACHABILITY_TIMEOUT_S`. All peers together get few connections, since a check keeps its
    places for that long.

    Args:
        places: for connections; 0: nothing is ever tried.
    """

    def __init__(self, places: int = MAX_CONNECTIONS) -> None:
        self._places = places
        # By peer, in the order in which they end.
        self._trials: dict[bytes, _Trial] = {}
        self._connections: dict[int, _Connection] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """The descriptor that is readable when something has come on a connection."""
        return self._epoll.fileno()

    def begin(self, peer: bytes, addresses: list[str], nonce: str, now: float) -> bool:
        """Connect to all of them for a peer; return whether it will be told of it. The next `take` may do so.

        Raises:
            WireError: one is no numeric tcp address.
        """
        targets = {address: _target(address) for address in addresses}
        begun = sum(trial.connections for trial in self._trials.values())
        if not (targets and nonce) or peer in self._trials or begun + len(targets) > self._places:
            return False
        trial = self._trials[peer] = _Trial(nonce.encode(), now + REACHABILITY_TIMEOUT_S, len(targets), len(targets))
        for address, (family, host, port) in targets.items():
            try:
                connection = _Connection(trial, address, socket.socket(family, socket.SOCK_STREAM))
            except OSError as error:
                trial.waiting -= 1
                trial.unreached[address] = str(error.strerror)
                continue
            connection.socket.setblocking(False)
            self._connections[connection.socket.fileno()] = connection
            refused = connection.socket.connect_ex((host, port))
            if refused in (0, EINPROGRESS):
                self._epoll.register(connection.socket, select.EPOLLIN)
            else:
                self._end(connection, os.strerror(refused))
        return True

    def next_deadline(self) -> float | None:
        """When `take` has something to do, whatever comes."""
        return next((trial.ends_at for trial in self._trials.values()), None)

    def take(self, now: float) -> list[tuple[bytes, ReachabilityReport]]:
        """Take in what came; return the peers of which everything is known now, and what they are to be told."""
        if not self._trials:
            return []
        for descriptor, _ in self._epoll.poll(0):
            self._read(self._connections[descriptor])
        for connection in list(self._connections.values()):
            if connection.trial.ends_at <= now:
                self._end(connection, f"no answer within {REACHABILITY_TIMEOUT_S:g} s")
        known = {peer: trial for peer, trial in self._trials.items() if not (trial.waiting or trial.is_told)}
        for trial in known.values():
            trial.is_told = True
        self._trials = {peer: trial for peer, trial in self._trials.items() if trial.ends_at > now}
        return [(peer, ReachabilityReport(trial.unreached)) for peer, trial in known.items()]

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections.values():
            connection.socket.close()
        self._epoll.close()

    def _read(self, connection: _Connection) -> None:
        nonce = connection.trial.nonce
        try:
            said = connection.socket.recv(len(nonce))
        except OSError as error:
            self._end(connection, str(error.strerror))
            return
        connection.heard += said
        if connection.heard == nonce:
            self._end(connection)
        elif not said or not nonce.startswith(connection.heard):
            self._end(connection, "something else answers")

    def _end(self, connection: _Connection, why_unreached: str = "") -> None:
        del self._connections[connection.socket.fileno()]
        # This takes it out of the epoll, too.
        connection.socket.close()
        connection.trial.waiting -= 1
        if why_unreached:
            connection.trial.unreached[connection.address] = why_unreached


def _target(address: str) -> tuple[int, str, int]:
    """Family, host and port. A name is refused, since to look it up blocks."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        numeric = ipaddress.ip_address(host.strip("[]"))
        if scheme == "tcp" and 0 < int(port) < 2**16:
            return (socket.AF_INET6 if numeric.version == 6 else socket.AF_INET), str(numeric), int(port)
    except ValueError:
        pass
    raise WireError(f"listening: expected tcp addresses with numeric hosts, got {address!r}")
