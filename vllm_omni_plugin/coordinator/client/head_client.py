"""A head's connection to the coordinator."""

import threading
import time
from collections.abc import Callable, Sequence

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, tell
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

# The coordinator counts on a beat in a second at the latest, and answers each.
MAX_INTERVAL = 1.0
# Frames taken in before it is seen what there is to send.
BATCH_FRAMES = 64


class OmniCoordClientForHead:
    """Tells a head of the replicas and of the other heads, and them of this one.

    One thread owns the socket; all methods are thread-safe. A coordinator that is away is no error: the last list
    stands, and the others' work is unknown until it is back.

    Args:
        coord_zmq_addr: The coordinator's ROUTER address.
        head_id: Of this process, unlike that of any other head; at most 128 characters.
        on_event: Called with what comes, in the client's own thread, one call after the other; must not block. After a
            `Welcome` the head reports its work in full.
        secrets: The fleet's, or None where it has none; tried in turn.
        heartbeat_interval: Seconds between beats; more than 1 counts as 1.
        on_unreachable: Called in the client's own thread with why there is no session, whenever that changes, and
            with "" once there is one; must not block.

    Raises:
        ConfigError: ``coord_zmq_addr`` is no address, or the interval is not positive.
        WireError: The coordinator would refuse ``head_id``.
    """

    def __init__(
        self,
        coord_zmq_addr: str,
        head_id: str,
        on_event: Callable[[SessionEvent], None],
        *,
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
        self._session = HeadSession(head_id)
        self._coordinator = f"the coordinator at {coord_zmq_addr}"
        self._trouble: str | None = None
        self._link = CoordinatorLink(coord_zmq_addr, open_head_dealer, secrets, self._link_changed)
        self._thread = threading.Thread(target=self._run, name="omni-head-client", daemon=True)
        self._thread.start()

    @property
    def invalid_frames(self) -> int:
        """How many frames and messages of the coordinator were dropped because they were not valid."""
        return self._link.invalid_frames

    def report_work(self, work: Sequence[ReplicaWork], *, full: bool) -> None:
        """Tell the other heads what is in flight here: all of it (``full``), or what changed.

        Without a session, or once closed, it is not sent.
        """
        with self._lock:
            if not self._closed:
                self._session.report(work, full)
                self._link.wake()

    def send(self, message: CallMessageFromHead) -> bool:
        """Say something of operators' calls; return False without a session, or once closed.

        Raises:
            WireError: The coordinator would refuse it: it is too large, or its arguments are no plain JSON.
        """
        with self._lock:
            sent = not self._closed and self._session.send(message)
            if sent:
                self._link.wake()
            return sent

    def resync(self) -> None:
        """Ask to be told everything anew, beginning with a `Welcome`."""
        with self._lock:
            if not self._closed:
                self._session.open(time.time_ns())
                self._link.wake()

    def close(self) -> None:
        """Leave, wait up to 2 s for the word to go out, give everything back. RuntimeError when called again."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the head client is closed already")
            self._closed = True
            self._session.leave()
            self._link.wake()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        self._serve()
        if self._link.connected:
            self._link.send_rest(self._session.frames)

    def _serve(self) -> None:
        next_beat = time.monotonic() + self._interval
        while True:
            is_blocked = not self._flush() and self._link.connected
            # As many wake-ups are for a report that is to go out.
            if self._link.wait(next_beat, zmq.POLLIN | (zmq.POLLOUT if is_blocked else 0)):
                self._take_frames()
            now = time.monotonic()
            with self._lock:
                if self._closed:
                    return
                if now >= next_beat:
                    next_beat = now + self._interval
                    self._session.beat()
                news = self._session.check_silence(now, time.time_ns())
            self._tell(news)

    def _flush(self) -> bool:
        with self._lock:
            return self._link.send_all(self._session.frames)

    def _take_frames(self) -> None:
        for _ in range(BATCH_FRAMES):
            try:
                parts = self._link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._lock:
                if self._closed:
                    return
                news = self._session.receive(b"".join(parts), time.monotonic())
            self._tell(news)

    def _link_changed(self, trouble: str) -> None:
        with self._lock:
            if trouble:
                self._session.disconnected()
            elif not self._closed:
                # The wall clock, because it also grows over a restart of the process.
                self._session.open(time.time_ns())
        if trouble:
            self._say(trouble)

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            tell(self._on_unreachable, trouble)

    def _tell(self, news: Sequence[SessionOutput]) -> None:
        for one in news:
            if isinstance(one, WireError):
                self._link.note_invalid(one)
            elif isinstance(one, SessionRefused):
                self._say(f"{self._coordinator} gives this head no session: {one.reason}")
            else:
                if isinstance(one, Welcome):
                    self._say("")
                elif isinstance(one, SessionLost):
                    self._say(f"{self._coordinator} is silent")
                tell(self._on_event, one)
