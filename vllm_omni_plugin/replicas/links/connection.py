"""What becomes of a ZMQ socket's connection: established, refused, lost."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.link import SocketReader

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
NEVER_RECONNECT = -1
"""The `reconnect_ivl` of a socket whose broken connection stays broken."""


class HandshakeRefusedError(ReplicaError):
    """The other end did not accept what we showed to prove ourselves, or is not who we take it for.

    Attributes:
        event: which failure of the handshake a ZMQ socket monitor reported.
        value: what it said of it.
    """

    def __init__(self, event: int, value: int) -> None:
        super().__init__("the security handshake failed")
        self.event = event
        self.value = value


class Connection:
    """Watches the one connection of a socket that is about to connect. Lives on the running event loop.

    Args:
        socket: not connected yet; the caller owns it, and closes this first.
        on_lost: called once when the connection breaks after it was established.

    Attributes:
        established: done when the security handshake succeeded, or the `ReplicaError` that ended it. A socket that
            reconnects leaves it open while nobody answers.
    """

    def __init__(self, socket: Socket, on_lost: Callable[[], None]) -> None:
        self.established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket = socket
        self._on_lost = on_lost
        self._monitor: Socket = socket.get_monitor_socket(_WATCHED)
        self._reader = SocketReader(self._monitor, self._on_event)
        self._reader.resume()
        self._stands = False
        self._closed = False

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stands = False
        self._reader.pause()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        if not self.established.cancel() and not self.established.cancelled():
            # Nobody may have waited for it; unread, it would be reported whenever the future is collected.
            self.established.exception()

    def _on_event(self, frames: list[Any]) -> None:
        message = parse_monitor_message([bytes(frame) for frame in frames])
        event = message["event"]
        if self._stands:
            if event == zmq.EVENT_DISCONNECTED:
                self._stands = False
                self._on_lost()
        elif self.established.done():
            return
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._stands = True
            self.established.set_result(None)
        elif event & _REFUSED:
            self.established.set_exception(HandshakeRefusedError(event, message["value"]))
        elif self._socket.reconnect_ivl == NEVER_RECONNECT:
            self.established.set_exception(ReplicaError("the connection could not be made"))
