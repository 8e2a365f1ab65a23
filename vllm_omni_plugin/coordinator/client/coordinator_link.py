"""A client's connection to the coordinator: how it stands, and the next secret when one is refused."""

import struct
import time
from collections import deque
from collections.abc import Callable

import zmq

from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import (
    LINK_FAILURES,
    RECONNECT_MAX_MS,
    Context,
    Socket,
    Wakeup,
    connect_watched,
    poll_ms,
)
from vllm_omni_plugin.curve import Secrets, why_refused
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


# How long closing may wait for the last word to leave: in the owner's queue, then in the socket.
CLOSE_GRACE = 1.0


class CoordinatorLink:
    """One socket at a time, opened anew when its handshake failed, since libzmq may never try that one again.

    All methods but `wake` are for one thread.

    Args:
        address: The coordinator's.
        open_socket: Returns a socket that is not connected yet.
        secrets: Tried in turn; once all were refused, again every second.
        on_change: Called with why there is no connection, whenever that changes, and with "" when there is one.

    Attributes:
        connected: Whether the handshake of the current connection succeeded.
        refused: Whether a handshake has failed with each of the secrets.
        invalid_frames: How much of what the coordinator sent was no valid frame or message, and was dropped.
    """

    def __init__(
        self,
        address: str,
        open_socket: Callable[[Context], Socket],
        secrets: Secrets | None,
        on_change: Callable[[str], None],
    ) -> None:
        self._address = address
        self._open_socket = open_socket
        self._secrets = secrets
        self._on_change = on_change
        self._failures = 0
        self._reopen_at: float | None = None
        self._trouble: str | None = None
        self.connected = self.refused = False
        self.invalid_frames = 0
        self._context: Context = zmq.Context()
        try:
            self.socket, self._monitor = self._connect()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def wake(self) -> None:
        """End the `wait` of the thread that waits. Thread-safe; not to be called after `close`."""
        self._wakeup.set()

    def send_all(self, frames: deque[bytes]) -> bool:
        """Take out of ``frames`` and send what the socket takes; return whether that was all."""
        try:
            # Only then, because what a socket holds is lost when another secret has to be tried.
            while frames and self.connected:
                self.socket.send(frames[0], zmq.NOBLOCK)
                frames.popleft()
        except zmq.Again:
            return False
        return not frames

    def send_rest(self, frames: deque[bytes]) -> None:
        """Send what is left before `close`, for which it waits up to 1 s."""
        deadline = time.monotonic() + CLOSE_GRACE
        while not self.send_all(frames) and time.monotonic() < deadline:
            self.wait(deadline, zmq.POLLOUT if self.connected else 0)

    def note_invalid(self, error: WireError) -> None:
        """Count a frame or message that is dropped, and log the first."""
        self.invalid_frames += 1
        if self.invalid_frames == 1:
            logger.warning("Dropped a frame of the coordinator: %r; more are counted, not logged", str(error))

    def wait(self, until: float | None, events: int) -> bool:
        """Sleep until ``until`` (monotonic seconds), `wake`, one of the socket's ``events`` or a change of the link.

        Returns whether it was one of the events.
        """
        self._poller.register(self.socket, events)
        deadlines = [deadline for deadline in (until, self._reopen_at) if deadline is not None]
        ready = dict(self._poller.poll(poll_ms(min(deadlines) - time.monotonic()) if deadlines else None))
        # To look in vain for what is not there takes as long as what a wake-up is for.
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        if self._monitor in ready:
            self._take_events()
        has_come = self.socket in ready
        if self._reopen_at is not None and self._reopen_at <= time.monotonic():
            self._reopen()
        return has_come

    def close(self, *, at_once: bool = False) -> None:
        """Give everything back, after up to 1 s for what was sent to leave unless ``at_once``."""
        self._close_sockets(0.0 if at_once else CLOSE_GRACE)
        self._context.term()
        self._wakeup.close()

    def _connect(self) -> tuple[Socket, Socket]:
        socket = self._open_socket(self._context)
        return socket, connect_watched(socket, self._address, self._secrets, self._failures)

    def _reopen(self) -> None:
        self._reopen_at = None
        self._poller.unregister(self._monitor)
        self._poller.register(self.socket, 0)
        self._close_sockets(linger=0.0)
        self.socket, self._monitor = self._connect()
        self._poller.register(self._monitor, zmq.POLLIN)

    def _close_sockets(self, linger: float) -> None:
        # In this order: the end of monitoring is an event as well, and waits for a reader.
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=poll_ms(linger))

    def _take_events(self) -> None:
        while True:
            try:
                event, value = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            # What comes of a socket that will be replaced tells nothing new; left unread it would keep `wait` awake.
            if self._reopen_at is None:
                self._take_event(event, value)

    def _take_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._set_state(True, "")
        elif event & LINK_FAILURES:
            self._failed(event, value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._set_state(False, f"the connection to the coordinator at {self._address} was lost")
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._set_state(False, f"no coordinator answers at {self._address}")

    def _failed(self, event: int, value: int) -> None:
        self._failures += 1
        tried_all = self._failures % (self._secrets.count if self._secrets else 1) == 0
        self._reopen_at = time.monotonic() + (RECONNECT_MAX_MS / 1000 if tried_all else 0.0)
        if tried_all:
            self.refused = True
            why = why_refused(event, value, self._secrets)
            self._set_state(False, f"cannot join the coordinator at {self._address}: {why}")

    def _set_state(self, connected: bool, trouble: str) -> None:
        self.connected = connected
        if trouble != self._trouble:
            self._trouble = trouble
            self._on_change(trouble)


def tell(callback: Callable[..., object] | None, *args: object) -> None:
    """Call back, if there is whom to call. What that raises is logged: the client goes on."""
    if callback is None:
        return
    try:
        callback(*args)
    except Exception:
        logger.exception("What the coordinator's client said could not be dealt with; what comes next will be told.")
