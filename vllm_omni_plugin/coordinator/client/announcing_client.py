"""How a replica tells the coordinator that it is there."""

import threading
import time
from collections import deque
from collections.abc import Callable

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, tell
from vllm_omni_plugin.coordinator.protocol.control_messages import EventType, ReplicaEvent, ReplicaStatus, encode_event
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_dealer
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError

# Every frame carries the whole registration, so while the coordinator is away only the newest few are worth keeping.
OUTBOX_FRAMES = 64


class OmniCoordClientForStage:
    """Announces one replica: UP at once, then with every change, and as a heartbeat when nothing changes.

    One thread owns the socket and sleeps until the next heartbeat or update; all methods are thread-safe. A coordinator
    that is away, or comes back, is no error: the replica is registered again as soon as there is a connection.

    Args:
        coord_zmq_addr: The coordinator's ROUTER address.
        input_addr: Address on which the replica takes requests.
        output_addr: Address on which it gives outputs.
        stage_id: Stage it serves.
        heartbeat_interval: Seconds between heartbeats; must be under a third of the coordinator's timeout.
        control_addr: Address on which heads attach; empty for a replica that needs no attaching.
        secrets: The fleet's, or None where it has none; tried in turn.
        on_unreachable: Called in the client's own thread with why the coordinator cannot be reached, for the operator
            of this end, whenever the reason changes, and with "" once it is reached; must not block.

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
        control_addr: str = "",
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
        self._said = ReplicaEvent(
            input_addr,
            output_addr,
            stage_id,
            "update",
            ReplicaStatus.UP,
            0,
            incarnation=_later_incarnation(),
            control_addr=control_addr,
        )
        self._say("update", ReplicaStatus.UP, 0)
        self._link = CoordinatorLink(coord_zmq_addr, open_dealer, secrets, self._link_changed)
        self._thread = threading.Thread(target=self._run, name="omni-stage-client", daemon=True)
        self._thread.start()

    @property
    def incarnation(self) -> int:
        """The number under which the replica announces itself now."""
        with self._lock:
            return self._said.incarnation

    @property
    def connected(self) -> bool:
        """Whether the coordinator has let this client in and the connection stands."""
        return self._link.connected

    def update_info(
        self,
        status: ReplicaStatus | None = None,
        queue_length: int | None = None,
        *,
        new_incarnation: bool = False,
    ) -> None:
        """Announce a new status, a new queue length (requests waiting), or both; what is None stays as it was.

        ``new_incarnation``: the replica has started again, so that heads must attach to it anew.

        Raises:
            ValueError: There is nothing to announce, or (`WireError`) a value is out of range.
            RuntimeError: The client is closed.
        """
        if status is None and queue_length is None and not new_incarnation:
            raise ValueError("at least one of status and queue_length must be given")
        with self._lock:
            if self._closed:
                raise RuntimeError("the stage client is closed")
            if new_incarnation:
                self._said = replace(self._said, incarnation=_later_incarnation(self._said.incarnation), sequence=0)
            self._say(
                "update",
                self._said.status if status is None else status,
                self._said.queue_length if queue_length is None else queue_length,
            )
            self._link.wake()

    def close(self) -> None:
        """Announce DOWN, wait up to 2 s for it to leave, give everything back. RuntimeError when called again."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the stage client is closed already")
            self._closed = True
            self._say("update", ReplicaStatus.DOWN, self._said.queue_length)
            self._link.wake()
        self._thread.join()
        self._link.close()

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
        self._announce()
        self._link.send_rest(self._outbox)

    def _announce(self) -> None:
        next_beat = time.monotonic() + self._interval
        while True:
            with self._lock:
                sent = self._link.send_all(self._outbox)
            self._link.wait(next_beat, zmq.POLLOUT if self._link.connected and not sent else 0)
            with self._lock:
                if self._closed:
                    return
                if time.monotonic() >= next_beat:
                    self._say("heartbeat", self._said.status, self._said.queue_length)
                    next_beat = time.monotonic() + self._interval

    def _link_changed(self, trouble: str) -> None:
        if not trouble:
            with self._lock:
                # Whatever was on its way when the last connection ended is lost.
                if not self._outbox:
                    self._say("heartbeat", self._said.status, self._said.queue_length)
        tell(self._on_unreachable, trouble)


def _later_incarnation(previous: int = 0) -> int:
    # The wall clock, because it also grows over a restart of the process. Should it have been set back, the
    # registration counts as soon as the coordinator has forgotten the previous one.
    return max(time.time_ns(), previous + 1)
