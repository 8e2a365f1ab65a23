"""The client of a head, which has a session at the coordinator."""

import threading
import time
from collections.abc import Callable, Sequence

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, notify
from vllm_omni_plugin.coordinator.client.head_session import HeadSession, SessionEvent, SessionOutput
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_head_dealer
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    CallMessageFromHead,
    ReplicaWork,
    SessionLost,
    SessionRefused,
    Welcome,
)
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError, WireError

# The coordinator expects a beat every second, and answers each.
MAX_INTERVAL = 1.0
# Frames received before pending frames are sent.
BATCH_FRAMES = 64


class OmniCoordClientForHead:
    """Exchanges the replica list, work in flight and operator calls between this head, the coordinator and other heads.

    One thread owns the socket; all methods are thread-safe. It calls ``on_event``, after a `Welcome` of which the head
    must report its work in full, and ``on_unreachable``, with the reason while there is no session and "" once there is
    one. Neither may block. A coordinator that is away is no error: the last list remains valid, and the work of the
    other heads is unknown. ``head_id`` is unique among all heads, with 128 characters at most. ``generation``: see
    `Hello`. ``heartbeat_interval`` is in seconds; more than 1 counts as 1.

    Raises `ConfigError` for an address or interval that cannot be used, `WireError` for such a ``head_id``.
    """

    def __init__(
        self,
        coord_zmq_addr: str,
        head_id: str,
        on_event: Callable[[SessionEvent], None],
        *,
        generation: str = "",
        secrets: Secrets | None = None,
        heartbeat_interval: float = 1.0,
        on_unreachable: Callable[[str], None] | None = None,
    ) -> None:
        if not heartbeat_interval > 0:
            raise ConfigError(f"heartbeat_interval must be positive, got {heartbeat_interval}")
        self._interval = min(heartbeat_interval, MAX_INTERVAL)
        self._on_event = on_event
        self._on_unreachable = on_unreachable
        self._lock = threading.Lock()
        self._closed = False
        self._session = HeadSession(head_id, generation)
        self._coordinator = f"the coordinator at {coord_zmq_addr}"
        self._problem: str | None = None
        self._link = CoordinatorLink(coord_zmq_addr, open_head_dealer, secrets, self._link_changed)
        self._thread = threading.Thread(target=self._run, name="omni-head-client", daemon=True)
        self._thread.start()

    @property
    def invalid_frames(self) -> int:
        return self._link.invalid_frames

    def report_work(self, work: Sequence[ReplicaWork], *, full: bool) -> None:
        """Report this head's work in flight: all of it (``full``), or what changed. Ignored without a session."""
        with self._lock:
            if not self._closed:
                self._session.report(work, full)
                self._link.wake()

    def send(self, message: CallMessageFromHead) -> bool:
        """Send a message; return False without a session. Raises `WireError` if it is too large or not plain JSON."""
        with self._lock:
            sent = not self._closed and self._session.send(message)
            if sent:
                self._link.wake()
            return sent

    def close(self) -> None:
        """Close the session, waiting up to 2 s for it to be sent, and stop. Raises RuntimeError when called again."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the head client is closed already")
            self._closed = True
            self._session.leave()
            self._link.wake()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        next_beat = time.monotonic() + self._interval
        while True:
            with self._lock:
                is_blocked = not self._link.send_all(self._session.frames) and self._link.connected
            if self._link.wait(next_beat, zmq.POLLIN | (zmq.POLLOUT if is_blocked else 0)):
                self._receive_frames()
            now = time.monotonic()
            with self._lock:
                if self._closed:
                    break
                if now >= next_beat:
                    next_beat = now + self._interval
                    self._session.beat()
                outputs = self._session.check_silence(now, time.time_ns())
            self._handle(outputs)
        if self._link.connected:
            self._link.send_rest(self._session.frames)

    def _receive_frames(self) -> None:
        for _ in range(BATCH_FRAMES):
            try:
                parts = self._link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._lock:
                if self._closed:
                    return
                outputs = self._session.receive(b"".join(parts), time.monotonic())
            self._handle(outputs)

    def _link_changed(self, problem: str) -> None:
        with self._lock:
            if problem:
                self._session.disconnected()
            elif not self._closed:
                # The wall clock grows also over a restart of the process.
                self._session.open(time.time_ns())
        if problem:
            self._report_problem(problem)

    def _report_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            notify(self._on_unreachable, problem)

    def _handle(self, outputs: Sequence[SessionOutput]) -> None:
        for output in outputs:
            if isinstance(output, WireError):
                self._link.record_invalid(output)
            elif isinstance(output, SessionRefused):
                self._report_problem(f"{self._coordinator} gives this head no session: {output.reason}")
            else:
                if isinstance(output, Welcome):
                    self._report_problem("")
                elif isinstance(output, SessionLost):
                    self._report_problem(f"{self._coordinator} is silent")
                notify(self._on_event, output)
