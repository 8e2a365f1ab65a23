"""The connection of a client to the coordinator: its state, and the next secret after a refused one."""

import struct
import time
from collections import deque
from collections.abc import Callable

import zmq

from vllm_omni_plugin.coordinator.protocol import coordinator_sockets as sockets
from vllm_omni_plugin.curve import Secrets, why_refused
from vllm_omni_plugin.errors import ConfigError, WireError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

# Seconds for which closing waits for unsent frames: once for the owner's queue, then for the socket's.
CLOSE_GRACE = 1.0


class CoordinatorLink:
    """Owns one socket, and opens a new one after a failed handshake, which libzmq may never repeat.

    All methods except `wake` belong to one thread. The secrets are tried in turn, and all again after 1 s; ``refused``:
    all handshakes have failed; ``connected``: the current one has succeeded. Invalid frames are dropped. ``on_change``
    gets each new reason why there is no authenticated connection, and "" when there is one.
    """

    def __init__(
        self,
        address: str,
        open_socket: Callable[[sockets.Context], sockets.Socket],
        secrets: Secrets | None,
        on_change: Callable[[str], None],
    ) -> None:
        self._address = address
        self._open_socket = open_socket
        self._secrets = secrets
        self._on_change = on_change
        self._failures = 0
        self._reopen_at: float | None = None
        self._problem: str | None = None
        self.connected = self.refused = False
        self.invalid_frames = 0
        self._context: sockets.Context = zmq.Context()
        try:
            self.socket, self._monitor = self._connect()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = sockets.Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def wake(self) -> None:
        """End a `wait`. Thread-safe. Must not be called after `close`."""
        self._wakeup.set()

    def send_all(self, frames: deque[bytes]) -> bool:
        """Send and remove ``frames`` while there is a connection with room. Returns whether none is left."""
        try:
            # Only while connected: the frames in a socket are lost if another secret must be tried.
            while frames and self.connected:
                self.socket.send(frames[0], zmq.NOBLOCK)
                frames.popleft()
        except zmq.Again:
            return False
        return not frames

    def send_rest(self, frames: deque[bytes]) -> None:
        """Send the remaining frames before `close`, for up to 1 s."""
        deadline = time.monotonic() + CLOSE_GRACE
        while not self.send_all(frames) and time.monotonic() < deadline:
            self.wait(deadline, zmq.POLLOUT if self.connected else 0)

    def record_invalid(self, error: WireError) -> None:
        """Count a dropped frame or message, and log the first."""
        self.invalid_frames += 1
        if self.invalid_frames == 1:
            logger.warning("Dropped a frame from the coordinator: %r; further ones are counted, not logged", str(error))

    def wait(self, until: float | None, events: int) -> bool:
        """Sleep until ``until`` (monotonic seconds) or an event; returns whether it was one of ``events``."""
        self._poller.register(self.socket, events)
        deadlines = [deadline for deadline in (until, self._reopen_at) if deadline is not None]
        ready = dict(self._poller.poll(sockets.poll_ms(min(deadlines) - time.monotonic()) if deadlines else None))
        # Checked first: a read without data would double the cost of a wake-up.
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        if self._monitor in ready:
            self._read_monitor()
        is_ready = self.socket in ready
        if self._reopen_at is not None and self._reopen_at <= time.monotonic():
            self._reopen()
        return is_ready

    def close(self, *, at_once: bool = False) -> None:
        """Close the sockets. Waits up to 1 s for unsent frames unless ``at_once``."""
        self._close_sockets(0.0 if at_once else CLOSE_GRACE)
        self._context.term()
        self._wakeup.close()

    def _connect(self) -> tuple[sockets.Socket, sockets.Socket]:
        socket = self._open_socket(self._context)
        try:
            return socket, sockets.connect_watched(socket, self._address, self._secrets, self._failures)
        except BaseException:
            # libzmq blocks a monitored socket whose events nobody reads.
            socket.disable_monitor()
            socket.close(linger=0)
            raise

    def _reopen(self) -> None:
        """Connect anew, with the next secret; if that is impossible now, keep the former socket and try again."""
        try:
            socket, monitor = self._connect()
        except (zmq.ZMQError, ConfigError) as error:
            self._reopen_at = time.monotonic() + sockets.RECONNECT_MAX_MS / 1000
            self._set_state(False, f"cannot connect to {self._address}: {error}")
            return
        self._reopen_at = None
        self._poller.unregister(self._monitor)
        self._poller.register(self.socket, 0)
        self._close_sockets(linger=0.0)
        self.socket, self._monitor = socket, monitor
        self._poller.register(self._monitor, zmq.POLLIN)

    def _close_sockets(self, linger: float) -> None:
        # In this order: the end of monitoring is an event, which needs a reader.
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=sockets.poll_ms(linger))

    def _read_monitor(self) -> None:
        while True:
            try:
                event, value = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            # Events of a socket that will be replaced are only read: unread ones would wake `wait` again and again.
            if self._reopen_at is None:
                self._handle_event(event, value)

    def _handle_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._set_state(True, "")
        elif event & sockets.LINK_FAILURES:
            self._try_next_secret(event, value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._set_state(False, f"the connection to the coordinator at {self._address} was lost")
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._set_state(False, f"no coordinator answers at {self._address}")

    def _try_next_secret(self, event: int, value: int) -> None:
        """A refused handshake: try the next secret at once; after all of them pause, and report why."""
        self._failures += 1
        tried_all = self._failures % (self._secrets.count if self._secrets else 1) == 0
        self._reopen_at = time.monotonic() + (sockets.RECONNECT_MAX_MS / 1000 if tried_all else 0.0)
        if tried_all:
            self.refused = True
            why = why_refused(event, value, self._secrets)
            self._set_state(False, f"cannot join the coordinator at {self._address}: {why}")

    def _set_state(self, connected: bool, problem: str) -> None:
        self.connected = connected
        if problem != self._problem:
            self._problem = problem
            self._on_change(problem)


def notify(callback: Callable[..., object] | None, *args: object) -> None:
    """Call an optional callback. Exceptions are logged, so that the client's thread goes on."""
    if callback is None:
        return
    try:
        callback(*args)
    except Exception:
        logger.exception("A callback of the coordinator's client failed; later events are still reported")
