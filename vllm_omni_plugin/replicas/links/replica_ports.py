"""The tcp ports of a replica server, which stay bound while ZMQ sockets are opened and closed on them."""

import errno
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq

from vllm_omni_plugin.errors import ConfigError

ADDRESS_FLAG = "--omni-replica-address"
PORTS_FLAG = "--omni-replica-ports"

REPLICA_PORTS = 3
"""One port for control, and two for the inputs and outputs of the first head."""

_BACKLOG = 128
_EPHEMERAL = 0


@dataclass(frozen=True)
class PortRange:
    """Both ends are included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "PortRange":
        """Read ``20000-20100``; `ConfigError` naming the flag if it is anything else."""
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip(), re.ASCII)
        if match is None:
            raise ConfigError(f"{PORTS_FLAG}: expected two ports as in 20000-20100, got {text!r}")
        first, last = int(match[1]), int(match[2])
        if not 1 <= first <= last <= 65535:
            raise ConfigError(f"{PORTS_FLAG}: ports are 1 to 65535 and the first is not above the last, got {text!r}")
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class Listener:
    """A tcp port that stays bound from `listen_on_ports` to `close`, for one ZMQ socket after another.

    No other process can take the port between two leases, and the next ZMQ socket can use it at once. Connections that
    arrive without a ZMQ socket wait in the backlog.
    """

    def __init__(self, listening: socket.socket) -> None:
        self.socket = listening
        host, port = listening.getsockname()[:2]
        self._is_ipv6 = listening.family == socket.AF_INET6
        self.address = f"tcp://[{host}]:{port}" if self._is_ipv6 else f"tcp://{host}:{port}"

    def bind(self, zmq_socket: "zmq.Socket[Any]") -> None:
        """Let a ZMQ socket accept connections to this port until the socket is closed."""
        zmq_socket.ipv6 = self._is_ipv6
        # Duplicated, because libzmq closes the descriptor.
        zmq_socket.setsockopt(zmq.USE_FD, os.dup(self.socket.fileno()))
        zmq_socket.bind(self.address)

    def close(self) -> None:
        self.socket.close()


def listen_on_ports(host: str, ports: PortRange | None, count: int) -> list[Listener]:
    """Bind the first `count` free ports of a range, or any, all or none. Raises ConfigError if that cannot be."""
    family, address = _resolve(host)
    listeners: list[Listener] = []
    try:
        for port in [_EPHEMERAL] * count if ports is None else range(ports.first, ports.last + 1):
            if len(listeners) == count:
                break
            try:
                listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
                listening.setblocking(False)
                listeners.append(Listener(listening))
            except OSError as error:
                why = os.strerror(error.errno or 0)
                if error.errno == errno.EACCES:
                    raise ConfigError(f"{PORTS_FLAG}: port {port} may not be bound: {why}") from error
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"{ADDRESS_FLAG}: {host} cannot be bound: {why}") from error
        if len(listeners) < count:
            raise ConfigError(
                f"{PORTS_FLAG}: of {ports or 'the ports of this machine'} {len(listeners)} are free on {host}, and "
                f"{count} are needed: name a range of free ports"
            )
    except ConfigError:
        close_all(listeners)
        raise
    return listeners


def close_all(listeners: Iterable[Listener]) -> None:
    for listener in listeners:
        listener.close()


def _resolve(host: str) -> tuple[int, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{ADDRESS_FLAG}: {host} is not an address: {error.strerror}") from error
    numeric = str(address[0])
    if numeric in ("0.0.0.0", "::"):
        raise ConfigError(f"{ADDRESS_FLAG}: {host} is a wildcard; heads need an address to connect to")
    return family, numeric
