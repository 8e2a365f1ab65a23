"""Who is in the fleet: a pure table, changed by announcements and by the passing of time.

States and rules follow SWIM as practised by hashicorp/memberlist: suspect before dead, left is not dead, older
incarnations are ignored, and a late observer doubts itself first. Times are monotonic seconds given by the caller and
never go back from one call to the next.
"""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaEvent, ReplicaKey, ReplicaStatus
from vllm_omni_plugin.errors import OmniError

# A heartbeat interval is under a third of the timeout, so a suspect has missed at least one.
SUSPECT_AFTER_FRACTION = 0.5
# How long a row that is gone goes on refusing replays, in heartbeat timeouts.
FORGET_AFTER_TIMEOUTS = 4.0
DEFAULT_MAX_REPLICAS = 4096


class TableFullError(OmniError):
    """The table holds as many replicas as it may, all of them present; the new one was refused."""


class Liveness(StrEnum):
    """What the table believes of a replica, beside what the replica says of itself."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


class Member(Struct, frozen=True):
    """One row: the last announcement accepted, and what the table makes of it. Times are monotonic seconds."""

    event: ReplicaEvent
    liveness: Liveness
    registered_at: float
    heard_at: float
    changed_at: float

    @property
    def takes_new_work(self) -> bool:
        """Whether requests may be sent to it."""
        return self.liveness is Liveness.ALIVE and self.event.status is ReplicaStatus.UP

    @property
    def may_finish_work(self) -> bool:
        """Whether it takes no new request but may still answer those it has."""
        present = self.liveness in (Liveness.ALIVE, Liveness.SUSPECT)
        return present and not self.takes_new_work and self.event.status in (ReplicaStatus.UP, ReplicaStatus.DRAINING)


class Change(Struct, frozen=True):
    """One row after a change (a forgotten one: as it was last).

    Attributes:
        member: The row.
        alters_list: Whether heads would see anything but a younger heartbeat.
        forgotten: The row that the table holds no longer, if there is one: this one, or one that made room for it.
    """

    member: Member
    alters_list: bool = True
    forgotten: Member | None = None


class MembershipTable:
    """At most ``max_replicas`` rows; a replica is dead after ``heartbeat_timeout`` seconds of silence.

    Every operation costs the same whatever the number of rows: all rows of one state share one timeout, so keeping each
    state's rows in the order of their last change keeps the next deadline in front.
    """

    def __init__(self, heartbeat_timeout: float, max_replicas: int = DEFAULT_MAX_REPLICAS) -> None:
        self._dead_after = heartbeat_timeout
        self._suspect_after = heartbeat_timeout * SUSPECT_AFTER_FRACTION
        self._forget_after = heartbeat_timeout * FORGET_AFTER_TIMEOUTS
        self._max_replicas = max_replicas
        self._alive: dict[ReplicaKey, Member] = {}
        self._suspect: dict[ReplicaKey, Member] = {}
        self._gone: dict[ReplicaKey, Member] = {}

    def __len__(self) -> int:
        return len(self._alive) + len(self._suspect) + len(self._gone)

    def __iter__(self) -> Iterator[Member]:
        """Yield all rows, also those that are gone but not yet forgotten."""
        yield from self._alive.values()
        yield from self._suspect.values()
        yield from self._gone.values()

    def get(self, key: ReplicaKey) -> Member | None:
        """Return the row of ``key``, or None."""
        return self._alive.get(key) or self._suspect.get(key) or self._gone.get(key)

    def apply(self, event: ReplicaEvent, now: float, *, authoritative: bool = False) -> Change | None:
        """Take in one announcement and return what it changed, or None if it says nothing new and was ignored.

        Ignored are events older than, or equal to, the one the row holds, and the leaving of an unknown replica. An
        ``authoritative`` event without numbers is about whichever incarnation the row holds and is never too old.
        Raises `TableFullError` when there is no place for a new replica.
        """
        row = self.get(ReplicaKey.of(event))
        if row is None:
            return None if event.status is ReplicaStatus.DOWN else self._admit(event, now)
        if authoritative and not event.incarnation:
            event = replace(event, incarnation=row.event.incarnation, sequence=row.event.sequence)
        elif not _supersedes(event, row.event):
            return None
        member = _after(row, event, now)
        if member.liveness is row.liveness is Liveness.LEFT:
            # In its place, since it is forgotten no later for that.
            self._gone[ReplicaKey.of(event)] = member
        else:
            self._store(member)
        said = replace(row.event, event_type=event.event_type, sequence=event.sequence)
        return Change(member, alters_list=member.liveness is not row.liveness or event != said)

    def expire(self, now: float, late_by: float = 0.0) -> list[Change]:
        """Return what silence up to ``now`` changed.

        ``late_by``: seconds by which the caller itself comes later than it meant to. Rows get that much more time,
        since their announcements may have been missed.
        """
        if late_by > 0:
            self._excuse(now, late_by)
        changes = []
        while (row := _first(self._alive)) and row.heard_at + self._suspect_after <= now:
            changes.append(self._store(replace(row, liveness=Liveness.SUSPECT, changed_at=now)))
        while (row := _first(self._suspect)) and row.heard_at + self._dead_after <= now:
            changes.append(self._store(replace(row, liveness=Liveness.DEAD, changed_at=now)))
        while (row := _first(self._gone)) and row.changed_at + self._forget_after <= now:
            del self._gone[ReplicaKey.of(row.event)]
            changes.append(Change(row, alters_list=False, forgotten=row))
        return changes

    def next_deadline(self) -> float | None:
        """Return when `expire` will next have something to do, or None if the table is empty."""
        deadlines = []
        if row := _first(self._alive):
            deadlines.append(row.heard_at + self._suspect_after)
        if row := _first(self._suspect):
            deadlines.append(row.heard_at + self._dead_after)
        if row := _first(self._gone):
            deadlines.append(row.changed_at + self._forget_after)
        return min(deadlines, default=None)

    def _admit(self, event: ReplicaEvent, now: float) -> Change:
        displaced = None
        if len(self) >= self._max_replicas:
            displaced = _first(self._gone)
            if displaced is None:
                raise TableFullError(f"the table is full with {self._max_replicas} replicas")
            self._remove(ReplicaKey.of(displaced.event))
        return replace(self._store(Member(event, Liveness.ALIVE, now, now, now)), forgotten=displaced)

    def _store(self, member: Member) -> Change:
        key = ReplicaKey.of(member.event)
        self._remove(key)
        buckets = {Liveness.ALIVE: self._alive, Liveness.SUSPECT: self._suspect}
        buckets.get(member.liveness, self._gone)[key] = member
        return Change(member)

    def _remove(self, key: ReplicaKey) -> None:
        for bucket in (self._alive, self._suspect, self._gone):
            bucket.pop(key, None)

    def _excuse(self, now: float, late_by: float) -> None:
        for bucket in (self._alive, self._suspect):
            for key, row in bucket.items():
                bucket[key] = replace(row, heard_at=min(now, row.heard_at + late_by))


def _first(bucket: dict[ReplicaKey, Member]) -> Member | None:
    return next(iter(bucket.values()), None)


def _supersedes(new: ReplicaEvent, old: ReplicaEvent) -> bool:
    if new.incarnation == old.incarnation and new.sequence == old.sequence == 0:
        return True
    return (new.incarnation, new.sequence) > (old.incarnation, old.sequence)


def _after(row: Member, event: ReplicaEvent, now: float) -> Member:
    if event.status is ReplicaStatus.DOWN:
        if row.liveness is Liveness.LEFT:
            return replace(row, event=event)
        return replace(row, event=event, liveness=Liveness.LEFT, heard_at=now, changed_at=now)
    if row.liveness is Liveness.LEFT or event.incarnation != row.event.incarnation:
        return Member(event, Liveness.ALIVE, now, now, now)
    if row.liveness is not Liveness.ALIVE:
        return replace(row, event=event, liveness=Liveness.ALIVE, heard_at=now, changed_at=now)
    return replace(row, event=event, heard_at=now)
