"""The server's end of the control link: decoded messages in, encoded messages out, nothing raised by what comes in."""

from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason, peer_of
from vllm_omni_plugin.curve import HANDSHAKE_MS, Gate, Secrets, secure_server
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.lease_messages import (
    CONTROL_ROLE,
    MAX_CONTROL_BYTES,
    FromServer,
    ToServer,
    decode_to_server,
    encode,
)
from vllm_omni_plugin.replicas.links.forwarding import Context
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.replicas.links.replica_ports import Listener

logger = init_logger(__name__)

_QUEUE_MESSAGES = 64
# A head on a link that was cut without a word is forgotten after this time, instead of TCP's quarter of an hour.
_LINK_CHECK_MS = 5000
_LINK_TIMEOUT_MS = 15000


class ControlSocket:
    """A ROUTER that is read on the running loop.

    Args:
        listener: the port to answer on.
        secrets: whose holders may connect; None admits everybody who can reach the port.
        on_message: called with the sender's routing id and its message. What it raises is logged, and reading goes on.
    """

    def __init__(
        self, listener: Listener, secrets: Secrets | None, on_message: Callable[[bytes, ToServer], None]
    ) -> None:
        self._on_message = on_message
        self._drops = DropLog()
        self._context: Context = zmq.Context()
        self._gate: Gate | None = None
        self._router = self._context.socket(zmq.ROUTER)
        # Before bind, also where `close` gives more: see `Ports` of the coordinator.
        self._router.linger = 0
        self._router.maxmsgsize = MAX_CONTROL_BYTES
        self._router.rcvhwm = self._router.sndhwm = _QUEUE_MESSAGES
        self._router.handshake_ivl = HANDSHAKE_MS
        self._router.heartbeat_ivl = _LINK_CHECK_MS
        self._router.heartbeat_timeout = _LINK_TIMEOUT_MS
        if secrets is not None:
            self._gate = Gate(self._context, secrets)
            self._gate.admit_secret_holders(CONTROL_ROLE)
            secure_server(self._router, secrets, CONTROL_ROLE)
            self._gate.watch(self._router, f"control {listener.address}")
        listener.bind(self._router)
        self._reader = SocketReader(self._router, self._take)
        self._reader.resume()

    @property
    def dropped(self) -> dict[str, int]:
        """Frames dropped so far, by reason."""
        return self._drops.counts

    def send(self, peer: bytes, message: FromServer) -> None:
        """Send to a head; dropped if it has gone or does not read."""
        self._router.send_multipart((peer, encode(message)), zmq.NOBLOCK)
        self._reader.look_again()

    def close(self, linger: float) -> None:
        """Stop; what was sent has up to `linger` seconds to leave, which this waits for."""
        self._reader.pause()
        self._router.close(linger=int(linger * 1000))
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _take(self, frames: list[Any]) -> None:
        address = peer_of(frames[-1])
        if len(frames) != 2:
            self._drops.record(DropReason.MULTIPART, address, f"{len(frames) - 1} frames instead of one")
            return
        try:
            message = decode_to_server(frames[1].bytes)
        except WireError as error:
            self._drops.record(DropReason.MALFORMED, address, str(error))
            return
        try:
            self._on_message(frames[0].bytes, message)
        except Exception:
            # A fault in handling one message must not end the reading of those that follow.
            logger.exception("A message of a head at %s could not be handled.", address)
