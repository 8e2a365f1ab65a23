"""The table of replicas, without sockets or clocks.

A heartbeat table with time limits, with states and incarnations as in SWIM (hashicorp/memberlist): late (there:
"suspect") comes before dead, left is not dead, older incarnations are ignored, and an observer that was delayed itself
extends the deadlines of present rows first.
Times are monotonic seconds, and never go back from one call to the next.
"""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaEvent, ReplicaKey, ReplicaStatus
from vllm_omni_plugin.errors import OmniError

# A heartbeat interval is under a third of the timeout, so a late replica has missed at least one.
LATE_AFTER_FRACTION = 0.5
# A row that is dead or left refuses replayed events for this time, in heartbeat timeouts.
FORGET_AFTER_TIMEOUTS = 4.0
DEFAULT_MAX_REPLICAS = 4096


class TableFullError(OmniError):
    """The table has its maximum number of present replicas, so a new one was refused."""


class Liveness(StrEnum):
    """The coordinator's view of a replica, apart from the status that the replica reports."""

    ALIVE = "alive"
    LATE = "late"
    DEAD = "dead"
    LEFT = "left"


class Member(Struct, frozen=True):
    """One row: the last accepted event and what follows from it. Times are monotonic seconds."""

    event: ReplicaEvent
    liveness: Liveness
    registered_at: float
    last_event_at: float
    changed_at: float

    @property
    def takes_new_work(self) -> bool:
        return self.liveness is Liveness.ALIVE and self.event.status is ReplicaStatus.UP

    @property
    def may_finish_work(self) -> bool:
        """Whether it takes no new requests but may still answer its current ones."""
        present = self.liveness in (Liveness.ALIVE, Liveness.LATE)
        return present and not self.takes_new_work and self.event.status in (ReplicaStatus.UP, ReplicaStatus.DRAINING)


class Change(Struct, frozen=True):
    """A row after a change. ``alters_list``: not only the time of its last event has changed."""

    member: Member
    alters_list: bool = True


class MembershipTable:
    """At most ``max_replicas`` rows; a replica is dead after ``heartbeat_timeout`` seconds of silence, and
    gets no new requests after half of that.

    All rows of one state share one timeout, so in a dict ordered by the last change the first row has the next
    deadline. Each operation takes constant time, except to extend the deadlines after a delay, which walks all rows.
    """

    def __init__(self, heartbeat_timeout: float, max_replicas: int = DEFAULT_MAX_REPLICAS) -> None:
        self._dead_after = heartbeat_timeout
        self._late_after = heartbeat_timeout * LATE_AFTER_FRACTION
        self._forget_after = heartbeat_timeout * FORGET_AFTER_TIMEOUTS
        self._max_replicas = max_replicas
        self._alive: dict[ReplicaKey, Member] = {}
        self._late: dict[ReplicaKey, Member] = {}
        self._gone: dict[ReplicaKey, Member] = {}
        # The present row of each host slot.
        self._slots: dict[str, ReplicaKey] = {}

    def __len__(self) -> int:
        return len(self._alive) + len(self._late) + len(self._gone)

    def __iter__(self) -> Iterator[Member]:
        yield from self._alive.values()
        yield from self._late.values()
        yield from self._gone.values()

    def get(self, key: ReplicaKey) -> Member | None:
        return self._alive.get(key) or self._late.get(key) or self._gone.get(key)

    def apply(self, event: ReplicaEvent, now: float, *, authoritative: bool = False) -> Change | None:
        """Apply one event and return the change, or None if the event was ignored.

        Ignored are events that are not newer than the row's, and DOWN of an unknown replica. An ``authoritative`` event
        without an incarnation applies to the row's incarnation and is never too old. Raises `TableFullError`.
        """
        row = self.get(ReplicaKey.of(event))
        if row is None:
            return None if event.status is ReplicaStatus.DOWN else self._admit(event, now)
        if authoritative and not event.incarnation:
            event = replace(event, incarnation=row.event.incarnation, sequence=row.event.sequence)
        elif not _supersedes(event, row.event):
            return None
        member = _updated(row, event, now)
        if member.liveness is row.liveness is Liveness.LEFT:
            # It keeps its place, because the time at which it is forgotten does not change.
            self._gone[ReplicaKey.of(event)] = member
        else:
            self._store(member)
        unchanged = replace(row.event, event_type=event.event_type, sequence=event.sequence)
        return Change(member, alters_list=member.liveness is not row.liveness or event != unchanged)

    def end_former(self, event: ReplicaEvent, now: float) -> Change | None:
        """End the row that had the host slot of a newly registered replica: two processes never have the same."""
        key = ReplicaKey.of(event)
        former_key = self._slots.get(event.host_slot, key)
        former = self.get(former_key)
        if former is None or former_key == key or event.status is ReplicaStatus.DOWN:
            return None
        if former.event.incarnation >= event.incarnation:
            return None
        change = self._store(replace(former, liveness=Liveness.LEFT, changed_at=now))
        self._slots[event.host_slot] = key
        return change

    def expire(self, now: float, late_by: float = 0.0) -> list[Change]:
        """Return the changes by silence up to ``now``.

        ``late_by``: seconds by which this call is late. All deadlines are extended by them, because events of that time
        may not have been handled yet.
        """
        if late_by > 0:
            self._extend_deadlines(now, late_by)
        changes = []
        while (row := _first(self._alive)) and row.last_event_at + self._late_after <= now:
            changes.append(self._store(replace(row, liveness=Liveness.LATE, changed_at=now)))
        while (row := _first(self._late)) and row.last_event_at + self._dead_after <= now:
            changes.append(self._store(replace(row, liveness=Liveness.DEAD, changed_at=now)))
        while (row := _first(self._gone)) and row.changed_at + self._forget_after <= now:
            del self._gone[ReplicaKey.of(row.event)]
            changes.append(Change(row, alters_list=False))
        return changes

    def next_deadline(self) -> float | None:
        """Return the next time at which `expire` has something to do; None if the table is empty."""
        deadlines = []
        if row := _first(self._alive):
            deadlines.append(row.last_event_at + self._late_after)
        if row := _first(self._late):
            deadlines.append(row.last_event_at + self._dead_after)
        if row := _first(self._gone):
            deadlines.append(row.changed_at + self._forget_after)
        return min(deadlines, default=None)

    def _admit(self, event: ReplicaEvent, now: float) -> Change:
        """Take a replica in; in a full table the one gone longest makes room, and without one it is refused."""
        if len(self) >= self._max_replicas:
            displaced = _first(self._gone)
            if displaced is None:
                raise TableFullError(f"the table is full with {self._max_replicas} replicas")
            self._remove(ReplicaKey.of(displaced.event))
        return self._store(Member(event, Liveness.ALIVE, now, now, now))

    def _store(self, member: Member) -> Change:
        key = ReplicaKey.of(member.event)
        self._remove(key)
        buckets = {Liveness.ALIVE: self._alive, Liveness.LATE: self._late}
        bucket = buckets.get(member.liveness, self._gone)
        bucket[key] = member
        if member.event.host_slot and bucket is not self._gone:
            self._slots.setdefault(member.event.host_slot, key)
        return Change(member)

    def _remove(self, key: ReplicaKey) -> None:
        for bucket in (self._alive, self._late, self._gone):
            row = bucket.pop(key, None)
            if row is not None and self._slots.get(row.event.host_slot) == key:
                del self._slots[row.event.host_slot]

    def _extend_deadlines(self, now: float, late_by: float) -> None:
        for bucket in (self._alive, self._late):
            for key, row in bucket.items():
                bucket[key] = replace(row, last_event_at=min(now, row.last_event_at + late_by))


def _first(bucket: dict[ReplicaKey, Member]) -> Member | None:
    return next(iter(bucket.values()), None)


def _supersedes(new: ReplicaEvent, old: ReplicaEvent) -> bool:
    """Whether an event is newer: of a later process, or a later one of the same."""
    if new.incarnation == old.incarnation and new.sequence == old.sequence == 0:
        return True
    return (new.incarnation, new.sequence) > (old.incarnation, old.sequence)


def _updated(row: Member, event: ReplicaEvent, now: float) -> Member:
    if event.status is ReplicaStatus.DOWN:
        if row.liveness is Liveness.LEFT:
            return replace(row, event=event)
        return replace(row, event=event, liveness=Liveness.LEFT, last_event_at=now, changed_at=now)
    if row.liveness is Liveness.LEFT or event.incarnation != row.event.incarnation:
        return Member(event, Liveness.ALIVE, now, now, now)
    if row.liveness is not Liveness.ALIVE:
        return replace(row, event=event, liveness=Liveness.ALIVE, last_event_at=now, changed_at=now)
    return replace(row, event=event, last_event_at=now)
