"""How a replica tells the coordinator that it is there."""

import threading
import time
from collections import deque

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.messages import EventType, ReplicaEvent, ReplicaStatus
from vllm_omni_plugin.coordinator.sockets import Context, connect_dealer, poll_ms
from vllm_omni_plugin.coordinator.wakeup import Wakeup
from vllm_omni_plugin.coordinator.wire import encode_event
from vllm_omni_plugin.errors import ConfigError

# Every frame carries the whole registration, so while the coordinator is away only the newest few are worth keeping.
OUTBOX_FRAMES = 64
# How long close() may wait for the last word to leave: in our outbox, then in the socket.
CLOSE_GRACE = 1.0


class OmniCoordClientForStage:
    """Announces one replica: UP at once, then with every change, and as a heartbeat when nothing changes.

    One thread owns the socket and sleeps until the next heartbeat or update; all methods are thread-safe. A coordinator
    that is away, or comes back, is no error: the next heartbeat registers the replica again.

    Args:
        coord_zmq_addr: The coordinator's ROUTER address.
        input_addr: Address on which the replica takes requests.
        output_addr: Address on which it gives outputs.
        stage_id: Stage it serves.
        heartbeat_interval: Seconds between heartbeats; must be under a third of the coordinator's timeout.

    Raises:
        ConfigError: ``coord_zmq_addr`` is no address, or the interval is not positive.
        WireError: The coordinator would refuse such a registration.
    """

    def __init__(
        self,
        coord_zmq_addr: str,
        input_addr: str,
        output_addr: str,
        stage_id: int,
        *,
        heartbeat_interval: float = 1.0,
    ) -> None:
        if not heartbeat_interval > 0:
            raise ConfigError(f"heartbeat_interval must be positive, got {heartbeat_interval}")
        self._interval = heartbeat_interval
        self._lock = threading.Lock()
        self._closed = False
        self._outbox: deque[bytes] = deque(maxlen=OUTBOX_FRAMES)
        # The wall clock, because it also grows over a restart of the process. Should it have been set back, the
        # registration counts as soon as the coordinator has forgotten the previous one.
        started = time.time_ns()
        self._said = ReplicaEvent(input_addr, output_addr, stage_id, "update", ReplicaStatus.UP, 0, incarnation=started)
        self._say("update", ReplicaStatus.UP, 0)
        self._context: Context = zmq.Context()
        try:
            self._socket = connect_dealer(self._context, coord_zmq_addr)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="omni-stage-client", daemon=True)
        self._thread.start()

    def update_info(self, status: ReplicaStatus | None = None, queue_length: int | None = None) -> None:
        """Announce a new status, a new queue length (requests waiting), or both; what is None stays as it was.

        Raises:
            ValueError: Both are None, or (`WireError`) a value is out of range.
            RuntimeError: The client is closed.
        """
        if status is None and queue_length is None:
            raise ValueError("at least one of status and queue_length must be given")
        with self._lock:
            if self._closed:
                raise RuntimeError("the stage client is closed")
            self._say(
                "update",
                self._said.status if status is None else status,
                self._said.queue_length if queue_length is None else queue_length,
            )
            self._wakeup.set()

    def close(self) -> None:
        """Announce DOWN, wait up to 2 s for it to leave, give everything back. RuntimeError when called again."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the stage client is closed already")
            self._closed = True
            self._say("update", ReplicaStatus.DOWN, self._said.queue_length)
            self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _say(self, event_type: EventType, status: ReplicaStatus, queue_length: int) -> None:
        event = replace(
            self._said,
            event_type=event_type,
            status=status,
            queue_length=queue_length,
            sequence=self._said.sequence + 1,
        )
        self._outbox.append(encode_event(event))
        self._said = event

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        try:
            self._announce(poller)
            self._send_last_words(poller)
        finally:
            self._socket.close(linger=poll_ms(CLOSE_GRACE))
            self._context.term()

    def _announce(self, poller: zmq.Poller) -> None:
        next_beat = time.monotonic() + self._interval
        while True:
            self._flush(poller)
            poller.poll(poll_ms(next_beat - time.monotonic()))
            self._wakeup.clear()
            with self._lock:
                if self._closed:
                    return
                if time.monotonic() >= next_beat:
                    self._say("heartbeat", self._said.status, self._said.queue_length)
                    next_beat = time.monotonic() + self._interval

    def _send_last_words(self, poller: zmq.Poller) -> None:
        deadline = time.monotonic() + CLOSE_GRACE
        while not self._flush(poller) and time.monotonic() < deadline:
            poller.poll(poll_ms(deadline - time.monotonic()))

    def _flush(self, poller: zmq.Poller) -> bool:
        """Send what the socket takes; return whether that was all. If not, the poller also waits for the socket."""
        with self._lock:
            try:
                while self._outbox:
                    self._socket.send(self._outbox[0], zmq.NOBLOCK)
                    self._outbox.popleft()
            except zmq.Again:
                poller.register(self._socket, zmq.POLLOUT)
                return False
        poller.register(self._socket, 0)
        return True
