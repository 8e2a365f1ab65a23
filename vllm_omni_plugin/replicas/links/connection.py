"""Watches the connection of a ZMQ socket: established, refused or lost."""

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
"""The `reconnect_ivl` of a socket that does not reconnect."""


class HandshakeRefusedError(ReplicaError):
    """Authentication failed, of this end or of the other end. Has the event of the ZMQ socket monitor and its value."""

    def __init__(self, event: int, value: int) -> None:
        super().__init__("the security handshake failed")
        self.event = event
        self.value = value


class Connection:
    """Watches the only connection of a socket that is not connected yet. Lives on the running event loop.

    `established` is done when the handshake succeeded, or raises the `ReplicaError` that ended it; if the socket
    reconnects, it stays pending while the address does not answer. `on_lost` is called once when the connection breaks
    after that. The caller closes this before the socket.
    """

    def __init__(self, socket: Socket, on_lost: Callable[[], None]) -> None:
        self.established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket = socket
        self._on_lost = on_lost
        self._monitor: Socket = socket.get_monitor_socket(_WATCHED)
        self._reader = SocketReader(self._monitor, self._on_event)
        self._reader.resume()
        self._is_open = False
        self._closed = False

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._is_open = False
        self._reader.pause()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        if not self.established.cancel() and not self.established.cancelled():
            # Mark an exception as retrieved, or asyncio would log it.
            self.established.exception()

    def _on_event(self, frames: list[Any]) -> None:
        message = parse_monitor_message([bytes(frame) for frame in frames])
        event = message["event"]
        if self._is_open:
            if event == zmq.EVENT_DISCONNECTED:
                self._is_open = False
                self._on_lost()
        elif self.established.done():
            return
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_open = True
            self.established.set_result(None)
        elif event & _REFUSED:
            self.established.set_exception(HandshakeRefusedError(event, message["value"]))
        elif self._socket.reconnect_ivl == NEVER_RECONNECT:
            self.established.set_exception(ReplicaError("the connection could not be made"))
