"""Who may connect to the secured sockets of a context: its ZAP handler (RFC 27 of ZeroMQ)."""

import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from vllm_omni_plugin.curve.descriptors import PendingConnections
from vllm_omni_plugin.curve.handshake_monitor import WATCHED_EVENTS, HandshakeMonitor, RefusalLog
from vllm_omni_plugin.curve.secrets import PLAIN_USERNAME, Secrets, Socket

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

NO_CREDENTIAL = ""
"""The credential of a peer without authentication (mechanism NULL)."""


class ZapHandler:
    """Decides who may connect to the secured sockets of one context (its ZAP handler), in a thread of its own.

    It must be there before the first of them is bound; while it is not, they admit nobody. Refusals are logged with the
    peer's address and counted. Messages of a connection it admits carry a `User-Id` that no other connection's do. Who
    sends more than a handshake takes without having been let in is cut off. All methods are thread-safe.

    Args:
        clock: Monotonic seconds, for the log's rate.

    Raises:
        zmq.ZMQError: The context has a ZAP handler already.
    """

    def __init__(
        self, context: zmq.Context[Any], secrets: Secrets | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._context = context
        self._secrets = secrets
        self._refusals = RefusalLog(clock)
        self._lock = threading.Lock()
        self._admitted: dict[str, set[bytes]] = {}
        self._arriving: deque[HandshakeMonitor] = deque()
        self._admissions = itertools.count()
        self._closed = False
        self._zap: Socket = context.socket(zmq.REP, socket_class=zmq.Socket)
        try:
            self._zap.bind(_ZAP_ENDPOINT)
        except BaseException:
            self._zap.close(linger=0)
            raise
        self._pending = PendingConnections()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="omni-zap", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """How many connections were refused so far."""
        return self._refusals.count

    def admit_secret_holders(self, domain: str) -> None:
        """Admit to sockets of ``domain`` the clients of `secure_client` with that role and any of the secrets."""
        if self._secrets is not None:
            for attempt in range(self._secrets.count):
                self.admit(domain, self._secrets.client_keys(domain, attempt).public.decode())

    def admit(self, domain: str, credential: str) -> None:
        """Admit to sockets of ``domain`` who shows this public CURVE key (Z85) or password."""
        with self._lock:
            self._admitted.setdefault(domain, set()).add(credential.encode())

    def watch(self, socket: Socket, name: str, on_last_disconnect: Callable[[], object] | None = None) -> None:
        """Log and count also those who fail before they have shown a key, and cut off those who send too much.

        Call after the socket's mechanism is set and before bind, in the thread that owns it. Close the socket before
        the ZAP handler, unless the context is terminated then: libzmq blocks a monitored socket whose events nobody
        reads.

        Args:
            on_last_disconnect: Called in the ZAP handler's thread when the last of those that were let in is gone.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the ZAP handler is closed")
            endpoint = f"inproc://omni-handshakes-{uuid.uuid4()}"
            socket.monitor(endpoint, WATCHED_EVENTS)
            reader: Socket = self._context.socket(zmq.PAIR, socket_class=zmq.Socket)
            reader.connect(endpoint)
            mechanism = int(socket.getsockopt(zmq.MECHANISM))
            watch = HandshakeMonitor(reader, name, self._refusals, self._pending, mechanism, on_last_disconnect)
            self._arriving.append(watch)
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Stop, after the sockets it guards were closed and before their context is. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._pending.close()
        os.close(self._wakeup)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        poller.register(self._pending.fileno(), zmq.POLLIN)
        watches: dict[Socket, HandshakeMonitor] = {}
        while not self._closed:
            for source, _ in poller.poll():
                if source is self._zap:
                    self._answer()
                elif source == self._pending.fileno():
                    for descriptor in self._pending.close_oversized():
                        for watch in watches.values():
                            watch.note_closed(descriptor)
                elif source == self._wakeup:
                    os.eventfd_read(self._wakeup)
                    while self._arriving:
                        watch = self._arriving.popleft()
                        watches[watch.reader] = watch
                        poller.register(watch.reader, zmq.POLLIN)
                elif not watches[source].take_event():
                    poller.unregister(source)
                    watches.pop(source).reader.close(linger=0)
        for reader in (self._zap, *watches, *(watch.reader for watch in self._arriving)):
            reader.close(linger=0)

    def _answer(self) -> None:
        version, request_id, domain, address, _, mechanism, *shown = self._zap.recv_multipart()
        if mechanism == b"CURVE":
            credential = z85.encode(shown[0])
        elif mechanism == b"PLAIN" and shown[0] == PLAIN_USERNAME.encode():
            credential = shown[1]
        else:
            credential = b""
        with self._lock:
            admitted = credential in self._admitted.get(domain.decode(), ())
        if not admitted:
            host = address.decode()
            self._refusals.record(host, host, domain.decode(), "what it shows is not admitted there (any more)")
        # The fifth frame becomes "User-Id" of every message of this connection.
        admission = b"%d" % next(self._admissions)
        self._zap.send_multipart([version, request_id, b"200" if admitted else b"400", b"", admission, b""])
