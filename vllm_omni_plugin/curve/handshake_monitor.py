"""Logs refused connections at a bounded rate, and cuts those for which no descriptor is left."""

import math
import struct
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.curve.descriptors import NO_DESCRIPTORS_LEFT, cut_connection, is_reserved
from vllm_omni_plugin.curve.secrets import FLAG
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

LOG_INTERVAL = 60.0
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED_EVENTS = (
    _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
)
_OTHER_SECRET = (
    f"it used another secret than this end's first one in {FLAG}; during a rotation a peer may do so before it uses "
    "its other one"
)
_OTHER_MECHANISM = f"it does not authenticate as this socket demands; see {FLAG}"
_MALFORMED = "its handshake is malformed"
_NOT_ADMITTED = "its key or password is not admitted there (any more)"
# Nothing else is seen of a peer that is killed or stands still in the handshake, or notices different mechanisms first.
_UNFINISHED = (
    f"it ended the connection or did not answer; if that goes on, it may authenticate in another way, see {FLAG}"
)


class RefusalLog:
    """Logs refused connections: the same socket and reason at most once in `LOG_INTERVAL`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}

    def record(self, where: str, why: str) -> None:
        now = self._clock()
        if self._logged_at.get((where, why), -math.inf) + LOG_INTERVAL <= now:
            self._logged_at[where, why] = now
            logger.warning(
                "Refused a connection at the %s socket: %s; more of them within %.0f s are not logged",
                where,
                why,
                LOG_INTERVAL,
            )


class HandshakeMonitor:
    """Reads the monitor of one server socket, because most failed handshakes never reach ZAP.

    ``on_last_disconnect``: called by `read_event` when the last authenticated peer has disconnected.
    """

    def __init__(
        self, reader: zmq.Socket[Any], name: str, refusals: RefusalLog, on_last_disconnect: Callable[[], object] | None
    ) -> None:
        self.reader = reader
        self._name = name
        self._refusals = refusals
        self._on_last_disconnect = on_last_disconnect
        # Descriptors.
        self._connections: set[int] = set()
        self._is_idle = True

    def read_event(self) -> bool:
        """Handle one event; return False after the last one."""
        event, value = struct.unpack("=Hi", self.reader.recv_multipart()[0])
        if event == zmq.EVENT_ACCEPTED and is_reserved(value):
            self._refusals.record(self._name, NO_DESCRIPTORS_LEFT)
            cut_connection(value)
        elif event == zmq.EVENT_ACCEPTED:
            self._connections.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_idle = False
        elif event & _FAILURES:
            self._refusals.record(self._name, _why_failed(event, value))
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(value)
        return bool(event != zmq.EVENT_MONITOR_STOPPED)

    def _disconnected(self, descriptor: int) -> None:
        self._connections.discard(descriptor)
        # The events do not tell which peers are authenticated, but the others last no longer than a handshake.
        if not (self._is_idle or self._connections):
            self._is_idle = True
            if self._on_last_disconnect is not None:
                self._on_last_disconnect()


def _why_failed(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return _UNFINISHED
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return _NOT_ADMITTED
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return _OTHER_SECRET
    return _OTHER_MECHANISM if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else _MALFORMED
