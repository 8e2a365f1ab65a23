"""The client with which a replica registers at the coordinator."""

import threading
import time
from collections import deque
from collections.abc import Callable

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, notify
from vllm_omni_plugin.coordinator.protocol.control_messages import EventType, ReplicaEvent, ReplicaStatus, encode_event
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_dealer
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError

# Each event is a complete registration, so while the coordinator is away only the newest few are kept.
OUTBOX_FRAMES = 64


class OmniCoordClientForStage:
    """Registers one replica: UP at once, then an event for each change, and heartbeats.

    One thread owns the socket; all methods are thread-safe. A coordinator that is away is no error: it gets the
    registration as soon as there is a connection. See `ReplicaEvent` for the fields. `heartbeat_interval`, in
    seconds, must be less than a third of the coordinator's timeout. The client's thread calls `on_unreachable`, which
    must not block, with each new reason, and with "" once the coordinator is reached.

    Raises `ConfigError` for an unusable address or interval, `WireError` if the registration would be refused.
    """

    def __init__(
        self,
        coord_zmq_addr: str,
        input_addr: str,
        output_addr: str,
        stage_id: int,
        *,
        heartbeat_interval: float = 1.0,
        control_addr: str = "",
        number: int = -1,
        host_slot: str = "",
        secrets: Secrets | None = None,
        on_unreachable: Callable[[str], None] | None = None,
    ) -> None:
        if not heartbeat_interval > 0:
            raise ConfigError(f"heartbeat_interval must be positive, got {heartbeat_interval}")
        self._interval = heartbeat_interval
        self._lock = threading.Lock()
        self._closed = False
        self._outbox: deque[bytes] = deque(maxlen=OUTBOX_FRAMES)
        self._on_unreachable = on_unreachable
        self._last = ReplicaEvent(
            input_addr,
            output_addr,
            stage_id,
            "update",
            ReplicaStatus.UP,
            0,
            incarnation=_next_incarnation(),
            control_addr=control_addr,
            number=number,
            host_slot=host_slot,
            in_use=False,
        )
        self._queue_event("update", ReplicaStatus.UP, 0)
        self._link = CoordinatorLink(coord_zmq_addr, open_dealer, secrets, self._link_changed)
        self._thread = threading.Thread(target=self._run, name="omni-stage-client", daemon=True)
        self._thread.start()

    @property
    def incarnation(self) -> int:
        with self._lock:
            return self._last.incarnation

    @property
    def connected(self) -> bool:
        return self._link.connected

    def update_info(
        self, status: ReplicaStatus | None = None, queue_length: int | None = None, *, new_incarnation: bool = False
    ) -> None:
        """Send what is given; with ``new_incarnation`` the replica has restarted, and heads must attach again.

        Raises ValueError if there is nothing to send or a value is out of range, RuntimeError if the client is closed.
        """
        if status is None and queue_length is None and not new_incarnation:
            raise ValueError("at least one of status and queue_length must be given")
        with self._lock:
            if self._closed:
                raise RuntimeError("the announcing client is closed")
            if new_incarnation:
                self._last = replace(self._last, incarnation=_next_incarnation(self._last.incarnation), sequence=0)
            self._queue_event(
                "update",
                self._last.status if status is None else status,
                self._last.queue_length if queue_length is None else queue_length,
            )
            self._link.wake()

    def announce_use(self, replica_id: int, in_use: bool) -> None:
        """Announce this with the next event, see `ReplicaEvent`. Ignored once closed."""
        with self._lock:
            self._last = replace(self._last, replica_id=replica_id, in_use=in_use)

    def close(self) -> None:
        """Send DOWN, waiting up to 2 s for it to be sent, and close. Raises RuntimeError when called again."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the announcing client is closed already")
            self._closed = True
            self._queue_event("update", ReplicaStatus.DOWN, self._last.queue_length)
            self._link.wake()
        self._thread.join()
        self._link.close()

    def _queue_event(self, event_type: EventType, status: ReplicaStatus, queue_length: int) -> None:
        event = replace(
            self._last,
            event_type=event_type,
            status=status,
            queue_length=queue_length,
            sequence=self._last.sequence + 1,
        )
        self._outbox.append(encode_event(event))
        self._last = event

    def _queue_heartbeat(self) -> None:
        self._queue_event("heartbeat", self._last.status, self._last.queue_length)

    def _run(self) -> None:
        next_heartbeat = time.monotonic() + self._interval
        while True:
            with self._lock:
                sent = self._link.send_all(self._outbox)
            self._link.wait(next_heartbeat, zmq.POLLOUT if self._link.connected and not sent else 0)
            with self._lock:
                if self._closed:
                    break
                if time.monotonic() >= next_heartbeat:
                    self._queue_heartbeat()
                    next_heartbeat = time.monotonic() + self._interval
        self._link.send_rest(self._outbox)

    def _link_changed(self, problem: str) -> None:
        """Announce the replica again after each connection, unless an event waits to be sent anyway."""
        if not problem:
            with self._lock:
                # Frames in flight were lost with the previous connection.
                if not self._outbox:
                    self._queue_heartbeat()
        notify(self._on_unreachable, problem)


def _next_incarnation(previous: int = 0) -> int:
    # The wall clock grows also over a restart of the process. If it was set back, the coordinator ignores the
    # registration until it has forgotten the previous one.
    return max(time.time_ns(), previous + 1)
