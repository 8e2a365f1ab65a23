"""The coordinator: replicas report to its ROUTER, one table, heads have sessions or read its PUB."""

import threading
import time
from collections.abc import Callable, Mapping

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.control_messages import (
    ReplicaEvent,
    ReplicaList,
    ReplicaStatus,
    decode_event,
    encode_event,
    encode_replica_list,
)
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import (
    MAX_TOPICS_PER_PEER,
    CoordinatorSockets,
    Socket,
    Wakeup,
    poll_ms,
)
from vllm_omni_plugin.coordinator.protocol.head_messages import HeadInfo, is_of_head
from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason, peer_of
from vllm_omni_plugin.coordinator.server.head_frames import HeadFrames
from vllm_omni_plugin.coordinator.server.reachability_checks import MAX_CONNECTIONS, ReachabilityChecks
from vllm_omni_plugin.coordinator.state.connected_heads import RELAY_INTERVAL, ConnectedHeads
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas, PublishSchedule, ReplicaIds, replica_list
from vllm_omni_plugin.coordinator.state.membership_table import Change, MembershipTable, TableFullError
from vllm_omni_plugin.curve import Secrets, cut_connection
from vllm_omni_plugin.errors import ConfigError, WireError

# Frames taken in before deadlines and publishing get their turn.
BATCH_FRAMES = 256
# Being late by less than this part of the heartbeat timeout is scheduling noise.
LATENESS_TOLERANCE_FRACTION = 0.1
_STALE = "older than what the table holds, or leaving while unknown"
_NO_SESSION = "from a head without a session on this connection"


class OmniCoordinator:
    """Keeps the table of replicas and publishes it. One thread owns the sockets; all public methods are thread-safe.

    The thread sleeps until a frame comes or the next deadline of a replica or of publishing is reached. Whatever comes
    over the network, it goes on: a frame that is not valid is counted in `invalid_frames` and dropped.

    Attributes:
        router_zmq_addr: Address bound for replicas, and for heads (`OmniCoordClientForHead`).
        pub_zmq_addr: Address bound for subscribers; each new one is sent the list at once.
    """

    def __init__(
        self,
        router_zmq_addr: str,
        pub_zmq_addr: str,
        heartbeat_timeout: float = 30.0,
        *,
        settle_time: float = 0.0,
        first_replica_ids: Mapping[int, int] | None = None,
        secrets: Secrets | None = None,
        fingerprints: Mapping[int, Mapping[str, str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind both addresses (port 0 or ``*``: any free one) and start serving.

        Args:
            router_zmq_addr: Address to bind for replicas and heads.
            pub_zmq_addr: Address to bind for subscribers.
            heartbeat_timeout: Seconds of silence after which a replica is dead; after half of them it is suspected.
            settle_time: Seconds to publish nothing, so that a restarted coordinator does not tell heads of an empty
                fleet before the replicas had time to report again.
            first_replica_ids: By stage, the lowest number that a replica gets. Those below are the head's own engines,
                which it does not register.
            secrets: Who does not hold one of them cannot connect; None admits everybody, unencrypted.
            fingerprints: By stage, what all its replicas have in common. Told to nodes that ask, but to nobody without
                secrets.
            clock: Monotonic seconds.
            wall_clock: Seconds since the epoch.

        Raises:
            ConfigError: An address cannot be bound, or the timeout is not positive.
        """
        if not heartbeat_timeout > 0:
            raise ConfigError(f"heartbeat_timeout must be positive, got {heartbeat_timeout}")
        self._clock = clock
        self._wall_clock = wall_clock
        self._late_tolerance = heartbeat_timeout * LATENESS_TOLERANCE_FRACTION
        self._lock = threading.Lock()
        self._turned = threading.Condition(self._lock)
        self._turns = 0
        self._closing = False
        self._stopped = threading.Event()
        self._table = MembershipTable(heartbeat_timeout)
        self._numbering = ReplicaIds(first_replica_ids)
        self._lists = ListDeltas(self._table, self._numbering)
        self._sessions = ConnectedHeads(self._lists)
        self._drops = DropLog()
        self._ticked_at = clock()
        self._schedule = PublishSchedule(self._ticked_at, quiet_until=self._ticked_at + settle_time)
        self._delta_schedule = PublishSchedule(self._ticked_at, self._ticked_at + settle_time, RELAY_INTERVAL)
        self._sockets = CoordinatorSockets(router_zmq_addr, pub_zmq_addr, secrets)
        self._router = self._sockets.router
        self._pub = self._sockets.pub
        self._fingerprints = {} if secrets is None else dict(fingerprints or {})
        # Without a secret anybody may ask, and nobody shall learn which ports this machine reaches.
        self._trials = ReachabilityChecks(0 if secrets is None else MAX_CONNECTIONS)
        self._heads = HeadFrames(self._sessions, self._router, self._facts, self._trials)
        # How many each connection subscribed to, by its descriptor. That is used again for the next one, so each count
        # belongs to an admission, too, which the ZAP handler gives every connection anew.
        self._topics: dict[int, tuple[str, int]] = {}
        self._has_subscribers = False
        self.router_zmq_addr = self._sockets.router_address
        self.pub_zmq_addr = self._sockets.pub_address
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._serve, name="omni-coordinator", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._closing else "serving"
            return f"<OmniCoordinator [{self.router_zmq_addr}, {self.pub_zmq_addr}: {len(self._table)} rows, {state}]>"

    @property
    def invalid_frames(self) -> dict[str, int]:
        """Frames dropped so far, by reason (`DropReason`). One over 256 KiB ends its connection and is not counted."""
        with self._lock:
            return self._drops.counts

    @property
    def refused_connections(self) -> int:
        """Connections refused so far because their peer holds none of the secrets, or for a malformed handshake."""
        return self._sockets.zap_handler.refused

    def add_new_replica(self, event: ReplicaEvent) -> None:
        """Register the replica that ``event`` describes.

        Raises:
            WireError: The event is invalid.
            TableFullError: There is no place for another replica.
            RuntimeError: The coordinator is closed.
        """
        self._apply_local(event)

    def update_replica_info(self, event: ReplicaEvent) -> None:
        """Take over what ``event`` says of its replica. Raises as `add_new_replica` does."""
        self._apply_local(event)

    def remove_replica(self, event: ReplicaEvent) -> None:
        """Take the replica of ``event`` out, whatever status that states, until it announces itself again."""
        self._apply_local(replace(event, event_type="update", status=ReplicaStatus.DOWN))

    def get_active_replicas(self) -> ReplicaList:
        """Return the list as it would be published now: in ``replicas`` those that are UP and not suspected."""
        with self._lock:
            return self._snapshot(self._clock())

    def publish_replica_list_update(self) -> bool:
        """Ask for the list to be published; return whether this is done at once.

        False when closed, or when the last list is less than 0.1 s old: the next one, due then, stands for both.
        """
        with self._lock:
            if self._closing:
                return False
            at_once = self._schedule.request(self._clock())
            self._wakeup.set()
            return at_once

    def wait_for_shutdown(self, timeout: float | None = None) -> bool:
        """Block until the coordinator serves no more: closed, or its thread failed. False after ``timeout`` seconds."""
        return self._stopped.wait(timeout)

    def wait_for_turn(self) -> None:
        """Block until its thread has come round once, which shows that it does not hang, or serves no more."""
        with self._turned:
            if not self._closing:
                self._wakeup.set()
            after = self._turns
            self._turned.wait_for(lambda: self._turns > after or self._stopped.is_set())

    def close(self) -> None:
        """Stop serving and give everything back. Raises RuntimeError when called again."""
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
        now = self._clock()
        change = self._table.apply(event, now, authoritative=authoritative)
        if change is not None:
            self._note([change], now)
        return change is not None

    def _note(self, changes: list[Change], now: float) -> None:
        if self._lists.record(changes):
            self._schedule.request(now)
            self._delta_schedule.request(now)

    def _snapshot(self, now: float) -> ReplicaList:
        return replica_list(self._table, self._numbering, now, self._wall_clock())

    def _serve(self) -> None:
        poller = zmq.Poller()
        sources: dict[Socket | int, Callable[[], None]] = {
            self._wakeup.fileno(): self._wakeup.clear,
            self._pub: self._take_subscriptions,
            self._router: self._take_frames,
            # What came is taken by every `_tick`.
            self._trials.fileno(): lambda: None,
        }
        for source in sources:
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                wake_at = self._next_wake()
                for source, _ in poller.poll(poll_ms(wake_at - self._clock())):
                    sources[source]()
                self._tick(wake_at)
        finally:
            self._trials.close()
            self._sockets.close()
            with self._turned:
                self._stopped.set()
                self._turned.notify_all()

    def _next_wake(self) -> float:
        with self._turned:
            self._turns += 1
            self._turned.notify_all()
            deadlines = (self._table.next_deadline(), self._sessions.next_deadline(), self._trials.next_deadline())
            due_at = min(self._schedule.due_at, self._delta_schedule.due_at)
            wake_at = min([due_at, *(deadline for deadline in deadlines if deadline is not None)])
            # A request that came since the last tick may have been due long before it: that is no lateness of ours.
            return max(wake_at, self._ticked_at)

    def _take_frames(self) -> None:
        for _ in range(BATCH_FRAMES):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._router.recv(copy=False)
            is_single = not _skip_rest(self._router, frame)
            with self._lock:
                self._take_frame(peer, frame, is_single)

    def _take_frame(self, peer: bytes, frame: zmq.Frame, is_single: bool) -> None:
        if not is_single:
            self._drops.record(DropReason.MULTIPART, peer_of(frame), "more than one frame")
            return
        try:
            if is_of_head(frame.bytes):
                if not self._take_from_head(peer, frame.bytes):
                    self._drops.record(DropReason.STALE, peer_of(frame), _NO_SESSION)
            elif not self._apply(decode_event(frame.bytes), authoritative=False):
                self._drops.record(DropReason.STALE, peer_of(frame), _STALE)
        except WireError as error:
            self._drops.record(DropReason.MALFORMED, peer_of(frame), str(error))
        except TableFullError as error:
            self._drops.record(DropReason.TABLE_FULL, peer_of(frame), str(error))

    def _take_from_head(self, peer: bytes, frame: bytes) -> bool:
        now = self._clock()
        if not self._lists.has_list:
            # The head shall not wait for a change to have its first list.
            self._delta_schedule.request(now)
        return self._heads.take(peer, frame, now)

    def _facts(self, stage_id: int) -> HeadInfo:
        fingerprint = dict(self._fingerprints.get(stage_id, {}))
        return HeadInfo(self._wall_clock(), sorted(self._fingerprints), fingerprint)

    def _take_subscriptions(self) -> None:
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
        if len(subscription.bytes) == 1:
            return
        connection, admission = int(subscription.get(zmq.SRCFD)), str(subscription.get("User-Id"))
        known, count = self._topics.get(connection, (admission, 0))
        count = count + 1 if known == admission else 1
        self._topics[connection] = admission, count
        if count > MAX_TOPICS_PER_PEER:
            with self._lock:
                self._drops.record(DropReason.TOPICS, peer_of(subscription), f"over {MAX_TOPICS_PER_PEER} topics")
            cut_connection(connection)

    def _tick(self, wake_at: float) -> None:
        with self._lock:
            now = self._ticked_at = self._clock()
            late_by = now - wake_at
            late_by = late_by if late_by > self._late_tolerance else 0.0
            self._note(self._table.expire(now, late_by), now)
            self._heads.send(self._sessions.expire(now, late_by))
            self._tell_heads(now)
            self._heads.tell_nodes(now)
            if now < self._schedule.due_at:
                return
            self._schedule.published(now)
            # Our own heads do not subscribe, and the whole list is dear.
            replicas = self._snapshot(now) if self._has_subscribers else None
        if replicas is not None:
            self._pub.send(encode_replica_list(replicas))

    def _tell_heads(self, now: float) -> None:
        if now >= self._delta_schedule.due_at:
            self._delta_schedule.published(now)
            delta = self._lists.next_delta(now, self._wall_clock())
            if delta is not None:
                self._heads.send(self._sessions.broadcast([delta]))
        self._heads.send(self._sessions.tick(now))


def _skip_rest(socket: Socket, frame: zmq.Frame) -> bool:
    """Read the frames after ``frame`` without keeping them; return whether there were any."""
    is_first_of_many = more = bool(frame.more)
    while more:
        more = bool(socket.recv(copy=False).more)
    return is_first_of_many
