"""The client of a head, which has a session at the coordinator: without sockets or clocks first, then on a thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, notify
from vllm_omni_plugin.coordinator.protocol import head_messages as wire
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import HEAD_QUEUE_FRAMES, open_head_dealer
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError, WireError

SILENCE_TIMEOUT = 2.0

SessionOutput = wire.SessionEvent | wire.SessionRefused | WireError
"""An event, the reason of a missing session, or the fault of a dropped frame."""


class HeadSession:
    """One session after the other. Times are monotonic seconds; ``number`` of a session: see `Hello`.

    A session ends with its connection, after `SILENCE_TIMEOUT`, with an invalid frame, and when more than
    `HEAD_QUEUE_FRAMES` wait to be sent. A full resync in both directions follows. ``frames`` are to be sent while there
    is a connection. ``generation``: see `Hello`. Raises `WireError` if the coordinator would refuse the id.
    """

    def __init__(self, head_id: str, generation: str = "") -> None:
        self._head_id = head_id
        self._generation = generation
        self._number = 0
        self._last_frame_at: float | None = None
        self._is_open = False
        self.frames: deque[bytes] = deque()
        self.open(0)

    def open(self, number: int) -> None:
        """Request a new session. Frames of the previous one are not sent."""
        self._number = max(number, self._number + 1)
        self._is_open = False
        self._send_hello()

    def disconnected(self) -> None:
        self._is_open = False

    def beat(self) -> None:
        """Send a heartbeat, or request a session where there is none."""
        if self._is_open:
            self._queue(wire.Beat())
        else:
            self._send_hello()

    def report(self, work: Sequence[wire.ReplicaWork], full: bool) -> None:
        for start in range(0, len(work) or 1, wire.ROWS_PER_FRAME):
            if self._is_open:
                self._queue(wire.WorkReport(full and start == 0, list(work[start : start + wire.ROWS_PER_FRAME])))

    def send(self, message: wire.CallMessageFromHead) -> bool:
        """Send a message. Returns False, and sends none, without a session."""
        if self._is_open:
            self._queue(message)
        return self._is_open

    def leave(self) -> None:
        self.frames.append(wire.encode_from_head(wire.Bye()))
        self._is_open = False

    def check_silence(self, now: float, number: int) -> list[SessionOutput]:
        """Request a new session if the coordinator has been silent for `SILENCE_TIMEOUT`."""
        if self._last_frame_at is None or now - self._last_frame_at < SILENCE_TIMEOUT:
            return []
        self._last_frame_at = None
        self.open(number)
        return [wire.SessionLost()]

    def receive(self, frame: bytes, now: float) -> list[SessionOutput]:
        try:
            messages = wire.decode_to_head(frame)
        except WireError as error:
            # The content is lost. The next beat requests a new session and with it a full resync.
            self._is_open = False
            return [error]
        outputs = [output for message in messages for output in self._of_this_session(message)]
        if self._is_open:
            # Frames without a session, such as refusals, do not count: other heads' work is unknown without one.
            self._last_frame_at = now
        return outputs

    def _of_this_session(self, message: wire.ToHead) -> Iterator[SessionOutput]:
        """Messages of a former session, and this head's own work, are ignored."""
        match message:
            case wire.Welcome():
                self._is_open = True
                yield message
            case wire.SessionRefused():
                yield message
            case _ if not self._is_open:
                return
            case wire.HeadWork() if message.head_id == self._head_id:
                return
            case _:
                yield message

    def _send_hello(self) -> None:
        self.frames.clear()
        self.frames.append(
            wire.encode_from_head(wire.Hello(self._head_id, self._number, wire.SESSION_PROTOCOL, self._generation))
        )

    def _queue(self, message: wire.FromHead) -> None:
        """Queue a message; a full queue is dropped for a new session."""
        frame = wire.encode_from_head(message)
        if len(self.frames) < HEAD_QUEUE_FRAMES:
            self.frames.append(frame)
        else:
            self.open(0)


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
        on_event: Callable[[wire.SessionEvent], None],
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

    def report_work(self, work: Sequence[wire.ReplicaWork], *, full: bool) -> None:
        """Report this head's work in flight: all of it (``full``), or what changed. Ignored without a session."""
        with self._lock:
            if not self._closed:
                self._session.report(work, full)
                self._link.wake()

    def send(self, message: wire.CallMessageFromHead) -> bool:
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
        """A new connection opens a new session; a lost one ends it."""
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
            elif isinstance(output, wire.SessionRefused):
                self._report_problem(f"{self._coordinator} gives this head no session: {output.reason}")
            else:
                if isinstance(output, wire.Welcome):
                    self._report_problem("")
                elif isinstance(output, wire.SessionLost):
                    self._report_problem(f"{self._coordinator} is silent")
                notify(self._on_event, output)
