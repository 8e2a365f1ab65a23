"""The ZAP handler (ZeroMQ RFC 27) of a context, which authenticates the peers of its secured sockets."""

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

from vllm_omni_plugin.curve.handshake_monitor import WATCHED_EVENTS, HandshakeMonitor, RefusalLog
from vllm_omni_plugin.curve.secrets import PLAIN_USERNAME, Secrets, Socket

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
                    self._answer()
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

    def _answer(self) -> None:
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
