"""Counts refused connections, and logs the peers' addresses at a bounded rate."""

import struct
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.curve.descriptors import (
    MAX_SENT_BEFORE_AUTH,
    NO_DESCRIPTORS_LEFT,
    PendingConnections,
    borrowed,
    cut_connection,
    is_reserved,
)
from vllm_omni_plugin.curve.secrets import FLAG
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

LOG_INTERVAL = 60.0
MAX_LOGGED_PEERS = 1024
WATCHED_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_FAILURES = {
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): f"it used another secret than this end's first one in {FLAG}; "
    "during a rotation a peer may do so before it uses its other one",
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): f"it does not authenticate as this socket demands; see {FLAG}",
}
_MALFORMED = "its handshake is malformed"
# Nothing else is seen of a peer that is killed or stands still in the handshake, or notices different mechanisms first.
_UNFINISHED = (
    f"it ended the connection or did not answer; if that goes on, it may authenticate in another way, see {FLAG}"
)
_TOO_MUCH = "it sent more than a handshake takes, without being authenticated"
_REFUSED = "Refused %s at the %s socket: %s"
_UNFINISHED_HANDSHAKE = "Unfinished handshake of %s at the %s socket: %s"
_UNKNOWN_PEER = ("", "a peer that was gone before its address could be read")


class RefusalLog:
    """Counts refused peers. Logs each host at most once, and at most 1,024 hosts, in `LOG_INTERVAL`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.count = 0

    def record(self, host: str, peer: str, where: str, why: str) -> None:
        """Count one failed handshake at the socket named ``where``. ``peer`` is ``host`` with or without a port."""
        if self._may_log(host):
            message = _UNFINISHED_HANDSHAKE if why is _UNFINISHED else _REFUSED
            logger.warning(
                f"{message}; more from there within %.0f s are counted, not logged", peer, where, why, LOG_INTERVAL
            )
        # After the log line, so that a reader of the count finds that line.
        self.count += 1

    def _may_log(self, host: str) -> bool:
        now = self._clock()
        # Ordered by time, so the expired ones come first.
        while self._logged_at and next(iter(self._logged_at.values())) + LOG_INTERVAL <= now:
            del self._logged_at[next(iter(self._logged_at))]
        if host in self._logged_at or len(self._logged_at) >= MAX_LOGGED_PEERS:
            return False
        self._logged_at[host] = now
        return True


class HandshakeMonitor:
    """Reads the monitor of one server socket, because most failed handshakes never reach ZAP.

    ``on_last_disconnect``: called by `read_event` when the last authenticated peer has disconnected.
    """

    def __init__(
        self,
        reader: zmq.Socket[Any],
        name: str,
        refusals: RefusalLog,
        pending: PendingConnections,
        mechanism: int,
        on_last_disconnect: Callable[[], object] | None,
    ) -> None:
        self.reader = reader
        self._name = name
        self._refusals = refusals
        self._pending = pending
        self._max_sent_before_auth = MAX_SENT_BEFORE_AUTH.get(mechanism)
        self._on_last_disconnect = on_last_disconnect
        # By descriptor: host, address, and the number of peers authenticated before.
        self._accepted: dict[int, tuple[str, str, int]] = {}
        self._authenticated = 0
        self._is_idle = True
        self._failure: str | None = None
        # Connections that the ZAP handler has refused and recorded, and that have not ended yet.
        self._recorded = 0
        self._ended: set[int] = set()

    def note_closed(self, descriptor: int) -> None:
        """Record that `PendingConnections` has ended a connection, perhaps of another socket."""
        if descriptor in self._accepted:
            self._ended.add(descriptor)

    def read_event(self) -> bool:
        """Handle one event; return False after the last one."""
        frame, endpoint = self.reader.recv_multipart()
        event, value = struct.unpack("=Hi", frame)
        if event == zmq.EVENT_ACCEPTED and is_reserved(value):
            # Logged as one peer: there may be hundreds, all with the same reason.
            self._refusals.record("", _peer_of(value)[1], self._name, NO_DESCRIPTORS_LEFT)
            cut_connection(value)
        elif event == zmq.EVENT_ACCEPTED:
            self._accepted[value] = (*_peer_of(value), self._authenticated)
            if self._max_sent_before_auth is not None:
                self._pending.add(value, endpoint.decode(), self._max_sent_before_auth)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._authenticated += 1
            self._is_idle = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failure = _FAILURES.get(value, _MALFORMED)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failure = _UNFINISHED
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._recorded += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(value)
        return bool(event != zmq.EVENT_MONITOR_STOPPED)

    def _disconnected(self, descriptor: int) -> None:
        host, peer, authenticated = self._accepted.pop(descriptor, (*_UNKNOWN_PEER, -1))
        # A failure event does not name its connection. The end of that connection is the next event, unless the ZAP
        # handler has refused it. libzmq reports no failure for a frame that is too large, but then no peer was
        # authenticated since this one connected.
        why, self._failure = self._failure, None
        if why is None and authenticated == self._authenticated:
            if self._recorded:
                self._recorded -= 1
            else:
                why = _TOO_MUCH
        if descriptor in self._ended:
            self._ended.discard(descriptor)
            why = _TOO_MUCH
        if why:
            self._refusals.record(host, peer, self._name, why)
        if not self._accepted:
            self._recorded = 0
        # The events do not tell which peers are authenticated, but the others last no longer than a handshake.
        if not (self._is_idle or self._accepted):
            self._is_idle = True
            if self._on_last_disconnect is not None:
                self._on_last_disconnect()


def _peer_of(descriptor: int) -> tuple[str, str]:
    """Return host and address of a connection's peer, if it still exists."""
    try:
        with borrowed(descriptor) as connection:
            host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return _UNKNOWN_PEER
    return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
