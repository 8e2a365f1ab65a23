"""Connections that were refused: counted always, logged with the peer's address at a bounded rate."""

import socket
import struct
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.curve.descriptors import NONE_LEFT, cut_connection, is_spare
from vllm_omni_plugin.curve.secrets import FLAG
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

LOG_INTERVAL = 60.0
MAX_LOGGED_PEERS = 1024
WATCHED_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_FAILURES = {
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): f"it holds another secret than this end's first one in {FLAG}",
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): f"it does not authenticate as this socket demands; see {FLAG}",
}
_MALFORMED = "its handshake is malformed"
# Both ends see that their mechanisms differ; if the peer is the first, this is all there is to see of it.
_UNFINISHED = f"it did not finish the handshake, like one that authenticates in another way, see {FLAG}"
_UNKNOWN_PEER = ("", "a peer that was gone before its address could be read")


class RefusalLog:
    """Counts refused peers; logs each at most once a minute, and no more than 1,024 different ones in a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.count = 0

    def record(self, host: str, peer: str, where: str, why: str) -> None:
        """Count one refusal of ``peer``, which is ``host`` with or without a port, at the socket called ``where``."""
        self.count += 1
        now = self._clock()
        # In the order of their times, so those that are over stand in front.
        while self._logged_at and next(iter(self._logged_at.values())) + LOG_INTERVAL <= now:
            del self._logged_at[next(iter(self._logged_at))]
        if host in self._logged_at or len(self._logged_at) >= MAX_LOGGED_PEERS:
            return
        self._logged_at[host] = now
        logger.warning(
            "Refused %s at the %s socket: %s; more from there within %.0f s are counted, not logged",
            peer,
            where,
            why,
            LOG_INTERVAL,
        )


class HandshakeWatch:
    """Reads the monitor of one server socket, because those who fail before they have shown a key never reach ZAP."""

    def __init__(self, reader: zmq.Socket[Any], name: str, refusals: RefusalLog) -> None:
        self.reader = reader
        self._name = name
        self._refusals = refusals
        self._accepted: dict[int, tuple[str, str]] = {}
        self._failure: str | None = None

    def take_event(self) -> bool:
        """Take in one event; return False when it was the last."""
        event, value = struct.unpack("=Hi", self.reader.recv_multipart()[0])
        if event == zmq.EVENT_ACCEPTED and is_spare(value):
            # All of them as one peer: there may be hundreds, and what is wrong is the same.
            self._refusals.record("", _peer_of(value)[1], self._name, NONE_LEFT)
            cut_connection(value)
        elif event == zmq.EVENT_ACCEPTED:
            self._accepted[value] = _peer_of(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failure = _FAILURES.get(value, _MALFORMED)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failure = _UNFINISHED
        elif event == zmq.EVENT_DISCONNECTED:
            host, peer = self._accepted.pop(value, _UNKNOWN_PEER)
            # A failure does not say whose it is; the same thread reports the end of that connection right after it.
            if self._failure is not None:
                self._refusals.record(host, peer, self._name, self._failure)
                self._failure = None
        return bool(event != zmq.EVENT_MONITOR_STOPPED)


def _peer_of(descriptor: int) -> tuple[str, str]:
    """Return the host and the whole address at the other end of a connection of libzmq's, if it still stands."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return _UNKNOWN_PEER
    try:
        host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return _UNKNOWN_PEER
    finally:
        # Closing it is for libzmq, whose it is.
        connection.detach()
    return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
