"""The link to a remote engine: tcp connections to two sockets of its replica server."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import zmq

from vllm_omni_plugin.curve import CURVE_BYTES, HANDSHAKE_FRAME_BYTES, PLAIN_USERNAME
from vllm_omni_plugin.errors import MessageTooLargeError, ReplicaError
from vllm_omni_plugin.replicas.control.lease_messages import Attached
from vllm_omni_plugin.replicas.links.connection import (
    NEVER_RECONNECT,
    Connection,
    Context,
    HandshakeRefusedError,
    Socket,
)
from vllm_omni_plugin.replicas.links.link import Link
from vllm_omni_plugin.replicas.remote.unreachable import why_unreachable
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

_CONNECT_TIMEOUT_MS = 3000
MIB = 2**20


@dataclass(frozen=True, slots=True)
class DataCredential:
    """Authenticates a head on the data sockets of one lease.

    Attributes:
        public: sent to the server in `Attach`, 40 characters: a CURVE public key (Z85), or a random string.
        secret: the secret half of the key (Z85), or "" if links are not encrypted.
    """

    public: str
    secret: str

    @classmethod
    def new(cls, encrypted: bool) -> Self:
        if not encrypted:
            return cls(secrets.token_hex(20), "")
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def apply(self, socket: Socket, data_key: str) -> None:
        """Use the credential for a socket's future connections to the server with the public key `data_key`."""
        if self.secret:
            socket.curve_serverkey = data_key.encode()
            socket.curve_publickey = self.public.encode()
            socket.curve_secretkey = self.secret.encode()
        else:
            socket.plain_username = PLAIN_USERNAME.encode()
            socket.plain_password = self.public.encode()


class RemoteLink(Link):
    """The link of one lease. Lives on the running event loop.

    `on_lost` is called when a connection breaks after it was established. Raises `ReplicaError` if an address or key of
    the lease is not valid.
    """

    def __init__(
        self,
        context: Context,
        lease: Attached,
        credential: DataCredential,
        max_output_bytes: int,
        on_lost: Callable[[], None],
    ) -> None:
        self.input_addr = lease.input_addr
        self.output_addr = lease.output_addr
        self.identity = lease.identity
        self._max_bytes = lease.max_message_bytes
        self._sockets = (context.socket(zmq.PUSH), context.socket(zmq.PULL))
        self.input_socket, self.output_socket = self._sockets
        self._connections: list[Connection] = []
        try:
            for socket, address in zip(self._sockets, (self.input_addr, self.output_addr), strict=True):
                self._connections.append(Connection(socket, on_lost))
                credential.apply(socket, lease.data_key)
                # On the input socket the server sends only handshakes.
                socket.maxmsgsize = (
                    HANDSHAKE_FRAME_BYTES if socket is self.input_socket else max_output_bytes + CURVE_BYTES
                )
                _connect(socket, address)
        except zmq.ZMQError as error:
            self.close()
            raise ReplicaError(f"cannot connect to {self.input_addr} and {self.output_addr}: {error}") from error

    async def established(self) -> None:
        """Return when both connections are open; raises `ReplicaError` with the address that failed."""
        for connection, address in zip(self._connections, (self.input_addr, self.output_addr), strict=True):
            try:
                await connection.established
            except HandshakeRefusedError as error:
                raise ReplicaError(f"{address} refused the data connection: {error}") from error
            except ReplicaError as error:
                raise ReplicaError(f"announced {address}, which {await why_unreachable(address)}") from error

    def send(self, frames: Frames) -> None:
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > self._max_bytes:
            raise MessageTooLargeError(
                f"The request takes {size / MIB:.1f} MiB on its way to the engine, where {self._max_bytes // MIB} MiB "
                f"are allowed (--omni-max-message-size of the replica's node)"
            )
        super().send(frames)

    def close(self) -> None:
        self._stop_reading()
        for connection in self._connections:
            connection.close()
        for socket in self._sockets:
            socket.close(linger=0)


def _connect(socket: Socket, address: str) -> None:
    # Unbounded, as in vLLM: requests are bounded before they reach this socket, and outputs by the reader's pauses.
    socket.sndhwm = socket.rcvhwm = 0
    socket.ipv6 = "[" in address
    socket.connect_timeout = _CONNECT_TIMEOUT_MS
    # Messages queued for this server must not reach the next process that listens at the address.
    socket.reconnect_ivl = NEVER_RECONNECT
    socket.connect(address)
