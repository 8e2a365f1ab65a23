"""The tcp ports of a replica server: which may be taken, and how one is kept while ZMQ sockets come and go on it."""

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
"""Where heads attach, and the inputs and outputs of the first of them."""

_BACKLOG = 128
_EPHEMERAL = (0,)


@dataclass(frozen=True)
class PortRange:
    """The ports from `first` to `last`, both included."""

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
    """A tcp port that is ours from `listen_on_ports` to `close`, whichever ZMQ socket answers on it in between.

    The port listens all the time, so that no other process can take it while one lease ends and the next begins, and so
    that it can be bound again at once. Connections that come while no ZMQ socket is there wait in the backlog.

    Attributes:
        address: ZMQ address to announce, with the port and a numeric host.
        socket: listens.
    """

    def __init__(self, listening: socket.socket) -> None:
        self.socket = listening
        host, port = listening.getsockname()[:2]
        self._is_ipv6 = listening.family == socket.AF_INET6
        self.address = f"tcp://[{host}]:{port}" if self._is_ipv6 else f"tcp://{host}:{port}"

    def bind(self, zmq_socket: "zmq.Socket[Any]") -> None:
        """Let a ZMQ socket accept the connections to this port until it is closed."""
        zmq_socket.ipv6 = self._is_ipv6
        # libzmq closes the descriptor that it is given.
        zmq_socket.setsockopt(zmq.USE_FD, os.dup(self.socket.fileno()))
        zmq_socket.bind(self.address)

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self.socket.close()


def _first_free(host: str, ports: PortRange | None) -> Listener | None:
    family, address = _resolve(host)
    for port in _EPHEMERAL if ports is None else range(ports.first, ports.last + 1):
        try:
            return Listener(_listening(family, (address, port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno == errno.EACCES:
                raise ConfigError(f"{PORTS_FLAG}: port {port} may not be bound: {error.strerror}") from error
            raise ConfigError(f"{ADDRESS_FLAG}: {host} cannot be bound: {error.strerror}") from error
    return None


def listen_on_ports(host: str, ports: PortRange | None, count: int) -> list[Listener]:
    """Take the first `count` free ports of a range, or any free ones if None; all or none.

    Raises:
        ConfigError: the host is no address of this machine that heads could connect to, or too few ports are free.
    """
    taken: list[Listener] = []
    try:
        for _ in range(count):
            listener = _first_free(host, ports)
            if listener is None:
                raise ConfigError(
                    f"{PORTS_FLAG}: of {ports or 'the ports of this machine'} {len(taken)} are free on {host}, and "
                    f"{count} are needed: name a range of free ports"
                )
            taken.append(listener)
    except ConfigError:
        close_all(taken)
        raise
    return taken


def close_all(listeners: Iterable[Listener]) -> None:
    """Give several ports back."""
    for listener in listeners:
        listener.close()


def _resolve(host: str) -> tuple[int, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{ADDRESS_FLAG}: {host} is no address: {error.strerror}") from error
    numeric = str(address[0])
    if numeric in ("0.0.0.0", "::"):
        raise ConfigError(f"{ADDRESS_FLAG}: {host} is every address of this machine; heads need one to connect to")
    return family, numeric


def _listening(family: int, address: tuple[str, int]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # For a port whose former connections are still waiting out their time.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
