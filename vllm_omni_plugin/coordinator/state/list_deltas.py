"""The replica list: what heads (`ListDeltas`) and subscribers (`replica_list`) get, and when (`PublishSchedule`)."""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaInfo, ReplicaKey, ReplicaList
from vllm_omni_plugin.coordinator.protocol.head_messages import FullList, ListDelta, encode_to_head
from vllm_omni_plugin.coordinator.state.membership_table import Change, Member, MembershipTable
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds


class ListDeltas:
    """The full list and the deltas for heads. ``has_list``: whether the first list was made.

    A delta has current rows, so a full list may be newer than the next delta.
    """

    def __init__(self, table: MembershipTable, replica_ids: ReplicaIds) -> None:
        self._table = table
        self._replica_ids = replica_ids
        self._touched: set[ReplicaKey] = set()
        self.has_list = False
        self._wall_offset = 0.0
        # Cached until a row changes: after a start of the coordinator all heads need it.
        self._full: Raw | None = None

    def record(self, changes: Iterable[Change]) -> bool:
        """Record changes of the table; return whether the next delta is not empty."""
        for change in changes:
            self._replica_ids.record(change)
            if change.alters_list:
                self._touched.add(ReplicaKey.of(change.member.event))
                self._full = None
        return bool(self._touched)

    def full_list(self, now: float) -> Raw | None:
        """Return the encoded `FullList`, or None before the first list. ``now``: monotonic seconds."""
        if self._full is None and self.has_list:
            listed = replica_list(self._table, self._replica_ids, now, now + self._wall_offset)
            self._full = encode_to_head(FullList(listed.replicas, listed.timestamp, listed.no_new_work))
        return self._full

    def next_delta(self, now: float, wall_now: float) -> Raw | None:
        """Return the encoded changes since the last call, or None without changes. The first call makes a full list.

        ``now`` and ``wall_now`` are the same moment in monotonic and in wall-clock seconds.
        """
        self._wall_offset = wall_now - now
        if not self.has_list:
            self.has_list = True
            self._touched.clear()
            return self.full_list(now)
        if not self._touched:
            return None
        delta = ListDelta([], wall_now, [], removed=[])
        for key in self._touched:
            member = self._table.get(key)
            if member is not None and (member.takes_new_work or member.may_finish_work):
                rows = delta.replicas if member.takes_new_work else delta.no_new_work
                rows.append(_row(member, self._replica_ids, self._wall_offset))
            else:
                delta.removed.append(key)
        self._touched.clear()
        # A list made since the change has the same rows, but an older timestamp than this delta.
        self._full = None
        return encode_to_head(delta)


def replica_list(members: Iterable[Member], replica_ids: ReplicaIds, now: float, wall_now: float) -> ReplicaList:
    """Return the list to publish, in the order of `ReplicaKey`. ``now`` (monotonic) is ``wall_now``, in seconds."""
    replicas: list[ReplicaInfo] = []
    no_new_work: list[ReplicaInfo] = []
    for member in sorted(members, key=lambda member: ReplicaKey.of(member.event)):
        if member.takes_new_work:
            replicas.append(_row(member, replica_ids, wall_now - now))
        elif member.may_finish_work:
            no_new_work.append(_row(member, replica_ids, wall_now - now))
    return ReplicaList(replicas=replicas, timestamp=wall_now, no_new_work=no_new_work)


def _row(member: Member, replica_ids: ReplicaIds, wall_offset: float) -> ReplicaInfo:
    """Return a member's row. ``wall_offset``: seconds from the monotonic clock to the wall clock."""
    event = member.event
    return ReplicaInfo(
        input_addr=event.input_addr,
        output_addr=event.output_addr,
        stage_id=event.stage_id,
        status=event.status,
        queue_length=event.queue_length,
        last_heartbeat=max(0.0, member.last_event_at + wall_offset),
        registered_at=max(0.0, member.registered_at + wall_offset),
        incarnation=event.incarnation,
        control_addr=event.control_addr,
        replica_id=replica_ids.id_of(event),
        in_use=event.in_use,
    )


MIN_INTERVAL = 0.1
KEEP_ALIVE_INTERVAL = 5.0


class PublishSchedule:
    """At most one list per interval, one per `KEEP_ALIVE_INTERVAL` or more, none before ``quiet_until`` (monotonic)."""

    def __init__(self, now: float, quiet_until: float, min_interval: float = MIN_INTERVAL) -> None:
        self._min_interval = min_interval
        self._allowed_at = quiet_until
        self._keep_alive_at = max(quiet_until, now + KEEP_ALIVE_INTERVAL)
        self._requested = quiet_until > now

    @property
    def due_at(self) -> float:
        return self._allowed_at if self._requested else self._keep_alive_at

    def request(self, now: float) -> bool:
        """Request a list; return whether it may be published at once."""
        self._requested = True
        return now >= self._allowed_at

    def published(self, now: float) -> None:
        self._requested = False
        self._allowed_at = now + self._min_interval
        self._keep_alive_at = now + KEEP_ALIVE_INTERVAL
