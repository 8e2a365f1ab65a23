"""The coordinator: replicas and heads connect to its ROUTER, subscribers to its PUB."""

import threading
import time
from collections.abc import Callable, Mapping

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol import coordinator_sockets as sockets
from vllm_omni_plugin.coordinator.protocol.control_messages import (
    ReplicaEvent,
    ReplicaList,
    ReplicaStatus,
    decode_event,
    encode_event,
    encode_replica_list,
)
from vllm_omni_plugin.coordinator.protocol.head_messages import HeadInfo, HeadQuery, generation_of, is_of_head
from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason, peer_of
from vllm_omni_plugin.coordinator.server.head_frames import HeadFrames
from vllm_omni_plugin.coordinator.state.connected_heads import RELAY_INTERVAL, ConnectedHeads
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas, PublishSchedule, replica_list
from vllm_omni_plugin.coordinator.state.membership_table import Change, MembershipTable, TableFullError
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds, ReplicaNumbers
from vllm_omni_plugin.curve import Secrets, cut_connection
from vllm_omni_plugin.errors import ConfigError, WireError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

# Frames received before deadlines and publishing are handled.
BATCH_FRAMES = 256
# Of the heartbeat timeout. If `_tick` is later than that, silent peers get that time in addition.
LATENESS_TOLERANCE_FRACTION = 0.1
_STALE = "older than the table's row, or DOWN of an unknown replica"
_NO_SESSION = "from a head without a session on this connection"


class OmniCoordinator:
    """Keeps the table of replicas and publishes it. One thread owns the sockets; all public methods are thread-safe.

    The thread sleeps until a frame comes or the next deadline. Invalid frames are counted in `invalid_frames` and
    dropped; they never stop it.
    ``router_zmq_addr`` and ``pub_zmq_addr`` are the bound addresses. A new subscriber gets the list at once.
    """

    def __init__(
        self,
        router_zmq_addr: str,
        pub_zmq_addr: str,
        heartbeat_timeout: float = 30.0,
        *,
        settle_time: float = 0.0,
        first_replica_ids: Mapping[int, int] | None = None,
        reserved_numbers: int = 0,
        secrets: Secrets | None = None,
        fingerprints: Mapping[int, Mapping[str, str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind both addresses (port 0 or ``*``: any free port) and start. Raises `ConfigError`.

        A replica is dead after ``heartbeat_timeout`` seconds of silence, and late after half of it. Nothing is
        published for ``settle_time`` seconds, so that heads get no list before replicas had time to register again. The
        head's own engines do not register: they have the ids of a stage below ``first_replica_ids`` and the numbers
        below ``reserved_numbers``. None as ``secrets`` admits everybody, without encryption. Nodes can query the
        ``fingerprints`` of stages, those of the head beside this coordinator, if there are secrets.
        """
        if not heartbeat_timeout > 0:
            raise ConfigError(f"heartbeat_timeout must be positive, got {heartbeat_timeout}")
        self._clock = clock
        self._wall_clock = wall_clock
        self._late_tolerance = heartbeat_timeout * LATENESS_TOLERANCE_FRACTION
        self._lock = threading.Lock()
        self._loop_passed = threading.Condition(self._lock)
        self._passes = 0
        self._closing = False
        self._stopped = threading.Event()
        self._table = MembershipTable(heartbeat_timeout)
        self._replica_ids = ReplicaIds(first_replica_ids)
        self._numbers = ReplicaNumbers(reserved_numbers)
        self._lists = ListDeltas(self._table, self._replica_ids)
        self._heads = ConnectedHeads(self._lists, generation_of(fingerprints or {}))
        self._drops = DropLog()
        self._ticked_at = clock()
        self._settled_at = self._ticked_at + settle_time
        self._schedule = PublishSchedule(self._ticked_at, quiet_until=self._settled_at)
        self._delta_schedule = PublishSchedule(self._ticked_at, self._settled_at, RELAY_INTERVAL)
        self._sockets = sockets.CoordinatorSockets(router_zmq_addr, pub_zmq_addr, secrets)
        self._router = self._sockets.router
        self._pub = self._sockets.pub
        self._fingerprints = {} if secrets is None else dict(fingerprints or {})
        self._head_frames = HeadFrames(self._heads, self._router, self._head_info)
        # User id and number of topics of each connection, by its descriptor. Descriptors are reused; the user id is the
        # one that the ZAP handler gives each connection.
        self._topics: dict[int, tuple[str, int]] = {}
        self._has_subscribers = False
        self.router_zmq_addr = self._sockets.router_address
        self.pub_zmq_addr = self._sockets.pub_address
        self._wakeup = sockets.Wakeup()
        self._thread = threading.Thread(target=self._serve, name="omni-coordinator", daemon=True)
        self._thread.start()

    @property
    def invalid_frames(self) -> dict[str, int]:
        """Dropped frames by `DropReason`. A frame over 256 KiB ends its connection and is not counted."""
        with self._lock:
            return self._drops.counts

    def add_new_replica(self, event: ReplicaEvent) -> None:
        """Register a replica. Raises `WireError`, `TableFullError`, or RuntimeError once closed."""
        self._apply_local(event)

    def update_replica_info(self, event: ReplicaEvent) -> None:
        self._apply_local(event)

    def remove_replica(self, event: ReplicaEvent) -> None:
        """Remove a replica, whatever the event's status, until it registers again."""
        self._apply_local(replace(event, event_type="update", status=ReplicaStatus.DOWN))

    def get_active_replicas(self) -> ReplicaList:
        """Return the current list; ``replicas`` has those that are UP and not late."""
        with self._lock:
            return self._snapshot(self._clock())

    def publish_replica_list_update(self) -> bool:
        """Request that the list is published; return whether this is done at once.

        False if closed, or if the last list is less than 0.1 s old: then one more follows 0.1 s after it.
        """
        with self._lock:
            if self._closing:
                return False
            at_once = self._schedule.request(self._clock())
            self._wakeup.set()
            return at_once

    def wait_for_shutdown(self, timeout: float | None = None) -> bool:
        """Block until the coordinator is closed or its thread has failed. Returns False after ``timeout`` seconds."""
        return self._stopped.wait(timeout)

    def wait_for_loop_pass(self) -> None:
        """Block until the thread has passed its loop once, so it does not hang, or until it has ended."""
        with self._loop_passed:
            if not self._closing:
                self._wakeup.set()
            after = self._passes
            self._loop_passed.wait_for(lambda: self._passes > after or self._stopped.is_set())

    def close(self) -> None:
        """Stop. Raises RuntimeError when called again."""
        with self._lock:
            if self._closing:
                raise RuntimeError("the coordinator is closed already")
            self._closing = True
            self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _apply_local(self, event: ReplicaEvent) -> None:
        encode_event(event)
        with self._lock:
            if self._closing:
                raise RuntimeError("the coordinator is closed")
            if not self._apply(event, authoritative=True):
                self._drops.record(DropReason.STALE, "this process", _STALE)
            self._wakeup.set()

    def _apply(self, event: ReplicaEvent, *, authoritative: bool) -> bool:
        """Take a replica's event over if it is newer; a former process in its host slot is ended with it."""
        now = self._clock()
        change = self._table.apply(event, now, authoritative=authoritative)
        if change is not None:
            former = self._table.end_former(event, now)
            # First, so that its number and id are free.
            self._record([change] if former is None else [former, change], now)
        return change is not None

    def _record(self, changes: list[Change], now: float) -> None:
        for event in self._numbers.record(changes):
            logger.warning(
                "The replica at %s has number %d, as another replica. Restart it, and it gets a number of its own.",
                event.control_addr or event.input_addr,
                event.number,
            )
        if self._lists.record(changes):
            self._schedule.request(now)
            self._delta_schedule.request(now)

    def _snapshot(self, now: float) -> ReplicaList:
        return replica_list(self._table, self._replica_ids, now, self._wall_clock())

    def _serve(self) -> None:
        poller = zmq.Poller()
        sources: dict[sockets.Socket | int, Callable[[], None]] = {
            self._wakeup.fileno(): self._wakeup.clear,
            self._pub: self._receive_subscriptions,
            self._router: self._receive_frames,
        }
        for source in sources:
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                wake_at = self._next_wake()
                for source, _ in poller.poll(sockets.poll_ms(wake_at - self._clock())):
                    sources[source]()
                self._tick(wake_at)
        finally:
            self._sockets.close()
            with self._loop_passed:
                self._stopped.set()
                self._loop_passed.notify_all()

    def _next_wake(self) -> float:
        with self._loop_passed:
            self._passes += 1
            self._loop_passed.notify_all()
            deadlines = (self._table.next_deadline(), self._heads.next_deadline())
            due_at = min(self._schedule.due_at, self._delta_schedule.due_at)
            wake_at = min([due_at, *(deadline for deadline in deadlines if deadline is not None)])
            # A request since the last tick may have been due before that tick. This is no lateness of this thread.
            return max(wake_at, self._ticked_at)

    def _receive_frames(self) -> None:
        for _ in range(BATCH_FRAMES):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._router.recv(copy=False)
            is_single = not _skip_rest(self._router, frame)
            with self._lock:
                self._handle_frame(peer, frame, is_single)

    def _handle_frame(self, peer: bytes, frame: zmq.Frame, is_single: bool) -> None:
        """Apply the frame of a replica or head; invalid, outdated and too many ones are counted and dropped."""
        if not is_single:
            self._drops.record(DropReason.MULTIPART, peer_of(frame), "more than one frame")
            return
        try:
            if is_of_head(frame.bytes):
                if not self._handle_head_frame(peer, frame.bytes):
                    self._drops.record(DropReason.STALE, peer_of(frame), _NO_SESSION)
            elif not self._apply(decode_event(frame.bytes), authoritative=False):
                self._drops.record(DropReason.STALE, peer_of(frame), _STALE)
        except WireError as error:
            self._drops.record(DropReason.MALFORMED, peer_of(frame), str(error))
        except TableFullError as error:
            self._drops.record(DropReason.TABLE_FULL, peer_of(frame), str(error))

    def _handle_head_frame(self, peer: bytes, frame: bytes) -> bool:
        now = self._clock()
        if not self._lists.has_list:
            # The head gets its first list without waiting for a change.
            self._delta_schedule.request(now)
        return self._head_frames.receive(peer, frame, now)

    def _head_info(self, query: HeadQuery) -> HeadInfo:
        """What a starting node learns. It gets its numbers of before only after the settle time."""
        fingerprint = dict(self._fingerprints.get(query.stage_id, {}))
        # Before, a running replica that has not registered again may have any number.
        numbers = self._numbers.for_host_slots(query.host_slots) if self._clock() >= self._settled_at else ()
        return HeadInfo(self._wall_clock(), sorted(self._fingerprints), fingerprint, numbers=numbers)

    def _receive_subscriptions(self) -> None:
        for _ in range(BATCH_FRAMES):
            try:
                message = self._pub.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if message.bytes.startswith(b"\x01"):
                self._has_subscribers = True
                self._count_topic(message)
                with self._lock:
                    self._schedule.request(self._clock())

    def _count_topic(self, subscription: zmq.Frame) -> None:
        """Cut the connection of a subscriber with more than `MAX_TOPICS_PER_PEER` topics."""
        if len(subscription.bytes) == 1:
            return
        connection, user_id = int(subscription.get(zmq.SRCFD)), str(subscription.get("User-Id"))
        known, count = self._topics.get(connection, (user_id, 0))
        count = count + 1 if known == user_id else 1
        self._topics[connection] = user_id, count
        if count > sockets.MAX_TOPICS_PER_PEER:
            with self._lock:
                self._drops.record(
                    DropReason.TOPICS, peer_of(subscription), f"over {sockets.MAX_TOPICS_PER_PEER} topics"
                )
            cut_connection(connection)

    def _tick(self, wake_at: float) -> None:
        """End what is silent, add the time that this thread was late itself, and publish lists that are due."""
        with self._lock:
            now = self._ticked_at = self._clock()
            late_by = now - wake_at
            late_by = late_by if late_by > self._late_tolerance else 0.0
            self._record(self._table.expire(now, late_by), now)
            self._head_frames.send(self._heads.expire(now, late_by))
            self._send_to_heads(now)
            if now < self._schedule.due_at:
                return
            self._schedule.published(now)
            # Our own heads do not subscribe, and a whole list is expensive.
            replicas = self._snapshot(now) if self._has_subscribers else None
        if replicas is not None:
            self._pub.send(encode_replica_list(replicas))

    def _send_to_heads(self, now: float) -> None:
        if now >= self._delta_schedule.due_at:
            self._delta_schedule.published(now)
            delta = self._lists.next_delta(now, self._wall_clock())
            if delta is not None:
                self._head_frames.send(self._heads.broadcast([delta]))
        self._head_frames.send(self._heads.tick(now))


def _skip_rest(socket: sockets.Socket, frame: zmq.Frame) -> bool:
    """Drop the frames after ``frame`` of the same message; return whether there were any."""
    has_more = more = bool(frame.more)
    while more:
        more = bool(socket.recv(copy=False).more)
    return has_more
