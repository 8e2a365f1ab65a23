"""The ZAP handler (ZeroMQ RFC 27) of a context: authenticates peers of secured sockets, and logs those it refuses."""

import itertools
import math
import os
import resource
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from vllm_omni_plugin.curve.secrets import FLAG, PLAIN_USERNAME, Secrets, Socket
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


RESERVED_DESCRIPTORS = 16
"""Number of connections that may come at once before one of them is cut."""
NO_DESCRIPTORS_LEFT = "this process has no descriptor left for it: raise its limit of open files (ulimit -n)"


def is_reserved(descriptor: int) -> bool:
    """Whether a descriptor is one of the last. The kernel always gives the lowest free one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - RESERVED_DESCRIPTORS


def cut_connection(descriptor: int) -> None:
    """Shut a connection of libzmq's down. If another peer has the descriptor by now, that peer connects again."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            # libzmq owns and closes it.
            connection.detach()


LOG_INTERVAL = 60.0
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED_EVENTS = (
    _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
)
_OTHER_SECRET = (
    f"its secret is not the first line of this end's {FLAG}; while secrets are rotated, a peer may try its two in turn"
)
_OTHER_MECHANISM = f"it uses no secret, or one where this end uses none: give both ends the same {FLAG}"
_MALFORMED = "its handshake is malformed"
_NOT_ADMITTED = "its key or password is not admitted there (any more)"
# Nothing else is seen of a peer that is killed or stands still in the handshake, or notices different mechanisms first.
_UNFINISHED = f"it ended the connection or did not answer; if that goes on, give both ends the same {FLAG}"


class RefusalLog:
    """Logs refused connections: the same socket and reason at most once in `LOG_INTERVAL`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}

    def record(self, where: str, why: str) -> None:
        """Log a refused connection, once in `LOG_INTERVAL` for each place and reason."""
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
        """Log a refused connection; cut one that took a reserved descriptor. Returns False after the last event."""
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
    """Name the cause of a refused handshake: another secret, none, a scanner, or no answer in time."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return _UNFINISHED
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return _NOT_ADMITTED
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return _OTHER_SECRET
    return _OTHER_MECHANISM if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else _MALFORMED


_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

NO_CREDENTIAL = ""
"""The credential of a peer with mechanism NULL."""


class ZapHandler:
    """Authenticates the peers of one context's secured sockets, in its own thread. All methods are thread-safe.

    Create it before binding these sockets; without it they refuse all peers. Messages of an admitted connection carry a
    unique ``User-Id``. Raises `zmq.ZMQError` if the context already has a ZAP handler.
    """

    def __init__(
        self, context: zmq.Context[Any], secrets: Secrets | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._context = context
        self._secrets = secrets
        self._refusals = RefusalLog(clock)
        self._lock = threading.Lock()
        self._admitted: dict[str, set[bytes]] = {}
        self._new_monitors: deque[HandshakeMonitor] = deque()
        self._user_ids = itertools.count()
        self._closed = False
        self._zap: Socket = context.socket(zmq.REP, socket_class=zmq.Socket)
        try:
            self._zap.bind(_ZAP_ENDPOINT)
        except BaseException:
            self._zap.close(linger=0)
            raise
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="omni-zap", daemon=True)
        self._thread.start()

    def admit_secret_holders(self, domain: str) -> None:
        """Admit clients of `secure_client` with the role ``domain`` and any of the secrets."""
        if self._secrets is not None:
            for attempt in range(self._secrets.count):
                self.admit(domain, self._secrets.client_keys(domain, attempt).public.decode())

    def admit(self, domain: str, credential: str) -> None:
        """Admit peers with this public CURVE key (Z85) or password to sockets of ``domain``."""
        with self._lock:
            self._admitted.setdefault(domain, set()).add(credential.encode())

    def watch(self, socket: Socket, name: str, on_last_disconnect: Callable[[], object] | None = None) -> None:
        """Log the refused connections of a socket, and cut those for which no descriptor is left.

        Call before bind, in the thread that owns the socket. Close the socket before the ZAP handler, unless the
        context is terminated then: libzmq blocks a monitored socket whose events nobody reads.
        ``on_last_disconnect`` is called in the ZAP handler's thread when no authenticated peer is left.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the ZAP handler is closed")
            endpoint = f"inproc://omni-handshakes-{uuid.uuid4()}"
            socket.monitor(endpoint, WATCHED_EVENTS)
            reader: Socket = self._context.socket(zmq.PAIR, socket_class=zmq.Socket)
            reader.connect(endpoint)
            self._new_monitors.append(HandshakeMonitor(reader, name, self._refusals, on_last_disconnect))
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Stop. Close the guarded sockets before, and the context after. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        os.close(self._wakeup)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        monitors: dict[Socket, HandshakeMonitor] = {}
        while not self._closed:
            for source, _ in poller.poll():
                if source is self._zap:
                    self._admit_or_refuse()
                elif source == self._wakeup:
                    os.eventfd_read(self._wakeup)
                    while self._new_monitors:
                        monitor = self._new_monitors.popleft()
                        monitors[monitor.reader] = monitor
                        poller.register(monitor.reader, zmq.POLLIN)
                elif not monitors[source].read_event():
                    poller.unregister(source)
                    monitors.pop(source).reader.close(linger=0)
        for reader in (self._zap, *monitors, *(monitor.reader for monitor in self._new_monitors)):
            reader.close(linger=0)

    def _admit_or_refuse(self) -> None:
        """Admit a connection if the credential is one of those of its socket, and no other."""
        version, request_id, domain, _, _, mechanism, *credentials = self._zap.recv_multipart()
        if mechanism == b"CURVE":
            credential = z85.encode(credentials[0])
        elif mechanism == b"PLAIN" and credentials[0] == PLAIN_USERNAME.encode():
            credential = credentials[1]
        else:
            credential = b""
        with self._lock:
            admitted = credential in self._admitted.get(domain.decode(), ())
        user_id = b"%d" % next(self._user_ids)
        self._zap.send_multipart([version, request_id, b"200" if admitted else b"400", b"", user_id, b""])
