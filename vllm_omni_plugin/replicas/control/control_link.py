"""The control connection of a head and a replica server: both ends."""

import math
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason, peer_of
from vllm_omni_plugin.curve import HANDSHAKE_MS, Secrets, ZapHandler, secure_client, secure_server, why_refused
from vllm_omni_plugin.errors import ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control import lease_messages as wire
from vllm_omni_plugin.replicas.links.connection import Connection, Context, HandshakeRefusedError
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.replicas.links.replica_ports import Listener

logger = init_logger(__name__)

_HEARTBEATS_PER_TIMEOUT = 12
_RECONNECT_MS = 100
_CONNECT_TIMEOUT_MS = 1000
# How long a closing head waits for its last messages to leave.
_LINGER_MS = 500
_QUEUE_MESSAGES = 64


class ControlClient:
    """The head's end, with the secret number `attempt`. Lives on the running event loop.

    `on_lost` is called when the connection breaks after it was established, as it does after `timeout` seconds without
    an answer of the server's machine. Raises ReplicaError if the address is not valid.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        secrets: Secrets | None,
        *,
        attempt: int,
        on_message: Callable[[wire.FromServer], None],
        on_lost: Callable[[], None],
        timeout: float,
    ) -> None:
        self._address = address
        self._on_message = on_message
        self._invalid_frames = 0
        self._socket = context.socket(zmq.DEALER)
        self.connection = Connection(self._socket, on_lost)
        self._reader = SocketReader(self._socket, self._receive)
        try:
            secure_client(self._socket, secrets, wire.CONTROL_ROLE, attempt)
            self._socket.ipv6 = "[" in address
            self._socket.maxmsgsize = wire.MAX_CONTROL_BYTES
            self._socket.heartbeat_ivl = math.ceil(timeout * 1000 / _HEARTBEATS_PER_TIMEOUT)
            self._socket.heartbeat_timeout = math.ceil(timeout * 1000)
            self._socket.reconnect_ivl, self._socket.connect_timeout = _RECONNECT_MS, _CONNECT_TIMEOUT_MS
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ReplicaError(f"cannot connect to {address!r}: {error}") from error
        self._reader.resume()

    def send(self, message: wire.ToServer) -> None:
        """Queue a message. It is dropped if the queue is full because there is no connection."""
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("A message to %s was dropped.", self._address)
        self._reader.look_again()

    def drain(self) -> None:
        self._reader.drain()

    def close(self) -> None:
        """Stop reading. Queued messages may still leave for half a second. Idempotent."""
        if not self._socket.closed:
            self.connection.close()
            self._reader.pause()
            self._socket.close(linger=_LINGER_MS)

    def _receive(self, frames: list[Any]) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"control message: {len(frames)} frames instead of one")
            message = wire.decode_from_server(bytes(frames[0]))
        except WireError as error:
            self._invalid_frames += 1
            if self._invalid_frames == 1:
                logger.warning("Dropped an invalid frame of %s; further ones are not logged: %s", self._address, error)
            return
        self._on_message(message)


async def open_control_link(
    context: Context,
    address: str,
    secrets: Secrets | None,
    on_message: Callable[[wire.FromServer], None],
    on_lost: Callable[[], None],
    *,
    timeout: float = OmniConfig().lease_timeout,
) -> ControlClient:
    """Connect with the first secret that the server accepts. Waits without limit while no server answers.

    Raises `ReplicaError` if the address is not valid, or the server accepts none of the secrets.
    """
    refusal: HandshakeRefusedError | None = None
    for attempt in range(secrets.count if secrets else 1):
        # A socket may not connect again after a refused handshake, so each secret needs a new socket.
        link = ControlClient(
            context, address, secrets, attempt=attempt, on_message=on_message, on_lost=on_lost, timeout=timeout
        )
        try:
            await link.connection.established
            return link
        except HandshakeRefusedError as error:
            link.close()
            refusal = error
        except BaseException:
            link.close()
            raise
    assert refusal is not None
    raise ReplicaError(f"{address}: {why_refused(refusal.event, refusal.value, secrets)}") from refusal


class ControlServer:
    """The server's end: a ROUTER that is read on the running loop. Without secrets every peer is admitted.

    A connection is closed when its peer has been silent for one and a half times `timeout` seconds, later than a lease
    ends. TCP alone would take a quarter of an hour.

    `on_message` is called with the sender's routing id and its message. Its exceptions are logged.
    """

    def __init__(
        self,
        listener: Listener,
        secrets: Secrets | None,
        on_message: Callable[[bytes, wire.ToServer], None],
        timeout: float = OmniConfig().heartbeat_timeout,
    ) -> None:
        self._on_message = on_message
        self._drops = DropLog()
        self._context: Context = zmq.Context()
        self._zap_handler: ZapHandler | None = None
        self._router = self._context.socket(zmq.ROUTER)
        # Before bind, also where `close` gives more: see `CoordinatorSockets`.
        self._router.linger = 0
        self._router.maxmsgsize = wire.MAX_CONTROL_BYTES
        self._router.rcvhwm = self._router.sndhwm = _QUEUE_MESSAGES
        self._router.handshake_ivl = HANDSHAKE_MS
        self._router.heartbeat_ivl = math.ceil(timeout * 500)
        self._router.heartbeat_timeout = math.ceil(timeout * 1500)
        if secrets is not None:
            self._zap_handler = ZapHandler(self._context, secrets)
            self._zap_handler.admit_secret_holders(wire.CONTROL_ROLE)
            secure_server(self._router, secrets, wire.CONTROL_ROLE)
            self._zap_handler.watch(self._router, f"control {listener.address}")
        listener.bind(self._router)
        self._reader = SocketReader(self._router, self._receive)
        self._reader.resume()

    def listen(self, listener: Listener) -> None:
        """Accept connections at one more address."""
        listener.bind(self._router)

    @property
    def dropped(self) -> dict[str, int]:
        return self._drops.counts

    def send(self, peer: bytes, message: wire.FromServer) -> None:
        """Send to a head. The message is dropped if the head is gone or its queue is full."""
        self._router.send_multipart((peer, wire.encode(message)), zmq.NOBLOCK)
        self._reader.look_again()

    def close(self, linger: float) -> None:
        """Close the socket; blocks up to `linger` seconds until queued messages have left."""
        self._reader.pause()
        self._router.close(linger=int(linger * 1000))
        if self._zap_handler is not None:
            self._zap_handler.close()
        self._context.term()

    def _receive(self, frames: list[Any]) -> None:
        address = peer_of(frames[-1])
        if len(frames) != 2:
            self._drops.record(DropReason.MULTIPART, address, f"{len(frames) - 1} frames instead of one")
            return
        try:
            message = wire.decode_to_server(frames[1].bytes)
        except WireError as error:
            self._drops.record(DropReason.MALFORMED, address, str(error))
            return
        try:
            self._on_message(frames[0].bytes, message)
        except Exception:
            # An error in one message must not stop the handling of later ones.
            logger.exception("A message of a head at %s could not be handled.", address)
