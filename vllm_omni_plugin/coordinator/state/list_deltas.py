"""The list of replicas: its numbers (`ReplicaIds`), what heads (`ListDeltas`) and subscribers (`replica_list`) are told
of the table, and when a list goes out (`PublishSchedule`)."""

from collections.abc import Iterable, Mapping

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaInfo, ReplicaKey, ReplicaList
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    FullList,
    KnownReplicaIds,
    ListDelta,
    ReplicaIdRow,
    encode_to_head,
)
from vllm_omni_plugin.coordinator.state.membership_table import DEFAULT_MAX_REPLICAS, Change, Member, MembershipTable


class ReplicaIds:
    """Gives each replica the lowest free number of its stage, and keeps it until it is released.

    Args:
        first: the lowest of a stage, by its id, where it is not 0.
    """

    def __init__(self, first: Mapping[int, int] | None = None) -> None:
        self._first = dict(first or {})
        self._numbers: dict[ReplicaKey, int] = {}
        self._former: dict[ReplicaKey, int] = {}
        self._taken: dict[int, set[int]] = {}
        self._lowest: dict[int, int] = {}

    def number_of(self, key: ReplicaKey) -> int:
        """Return the number of a replica, which has one from now on."""
        number = self._numbers.get(key)
        if number is None:
            former = self._former.pop(key, None)
            number = self._numbers[key] = self._take_lowest(key.stage_id) if former is None else former
        return number

    def reserve(self, numbers: Iterable[ReplicaIdRow]) -> None:
        """Keep the numbers that replicas had, for when they are asked for. What is taken or known already stays so."""
        for row in numbers:
            key = ReplicaKey.of(row)
            taken = self._taken.setdefault(row.stage_id, set())
            known = key in self._numbers or key in self._former or row.replica_id in taken
            allowed = row.replica_id >= self._first.get(row.stage_id, 0)
            if allowed and not known and len(self._former) < DEFAULT_MAX_REPLICAS:
                self._former[key] = row.replica_id
                taken.add(row.replica_id)

    def end_reservations(self) -> None:
        """Free the numbers that nobody has asked for."""
        for key, number in self._former.items():
            self._free(key.stage_id, number)
        self._former.clear()

    def release(self, key: ReplicaKey) -> None:
        """Free the number of a replica, if it has one."""
        number = self._numbers.pop(key, None)
        if number is not None:
            self._free(key.stage_id, number)

    def _take_lowest(self, stage_id: int) -> int:
        taken = self._taken.setdefault(stage_id, set())
        number = self._lowest_of(stage_id)
        while number in taken:
            number += 1
        taken.add(number)
        self._lowest[stage_id] = number + 1
        return number

    def _free(self, stage_id: int, number: int) -> None:
        self._taken[stage_id].remove(number)
        self._lowest[stage_id] = min(number, self._lowest_of(stage_id))

    def _lowest_of(self, stage_id: int) -> int:
        """A number below which all are taken."""
        return self._lowest.get(stage_id, self._first.get(stage_id, 0))


class ListDeltas:
    """What heads are told of a table. A delta has rows as they are now, so a full list may be ahead of the next one.

    Args:
        table: What is listed.
        numbering: The numbers of the rows.

    Attributes:
        has_list: Whether there was a list yet.
    """

    def __init__(self, table: MembershipTable, numbering: ReplicaIds) -> None:
        self._table = table
        self._numbering = numbering
        self._touched: set[ReplicaKey] = set()
        self.has_list = False
        self._wall_offset = 0.0
        # Until a row changes: after the start of a coordinator all heads ask for it.
        self._full: Raw | None = None

    def record(self, changes: Iterable[Change]) -> bool:
        """Note what changed in the table; return whether there is something for the next delta."""
        for change in changes:
            if change.alters_list:
                self._touched.add(ReplicaKey.of(change.member.event))
                self._full = None
            if change.forgotten is not None:
                self._numbering.release(ReplicaKey.of(change.forgotten.event))
        return bool(self._touched)

    def reserve(self, numbers: KnownReplicaIds) -> None:
        """Keep the numbers that replicas had before this coordinator. Once there is a first list it is too late."""
        if not self.has_list:
            self._numbering.reserve(numbers.numbers)

    def full(self, now: float) -> Raw | None:
        """Return the whole list as a `FullList`, or None if there was no list yet. ``now``: monotonic seconds."""
        if self._full is None and self.has_list:
            listed = replica_list(self._table, self._numbering, now, now + self._wall_offset)
            self._full = encode_to_head(FullList(listed.replicas, listed.timestamp, listed.no_new_work))
        return self._full

    def next_delta(self, now: float, wall_now: float) -> Raw | None:
        """Return what changed since the last time, for heads that have the last list; None if nothing did.

        The first time it is the whole list. ``now`` and ``wall_now`` are one moment in monotonic and in wall-clock
        seconds.
        """
        self._wall_offset = wall_now - now
        if not self.has_list:
            self.has_list = True
            self._touched.clear()
            whole_list = self.full(now)
            self._numbering.end_reservations()
            return whole_list
        if not self._touched:
            return None
        delta = ListDelta([], wall_now, [], removed=[])
        for key in self._touched:
            member = self._table.get(key)
            if member is not None and (member.takes_new_work or member.may_finish_work):
                rows = delta.replicas if member.takes_new_work else delta.no_new_work
                rows.append(_row(member, self._numbering, self._wall_offset))
            else:
                delta.removed.append(key)
        self._touched.clear()
        # One made since the change says the same, but that it is older than this delta.
        self._full = None
        return encode_to_head(delta)


def replica_list(members: Iterable[Member], numbering: ReplicaIds, now: float, wall_now: float) -> ReplicaList:
    """Return the list to publish, sorted by `ReplicaKey` so that it keeps its order from one time to the next.

    ``now`` and ``wall_now`` are one moment in monotonic and in wall-clock seconds.
    """
    replicas: list[ReplicaInfo] = []
    no_new_work: list[ReplicaInfo] = []
    for member in sorted(members, key=lambda member: ReplicaKey.of(member.event)):
        if member.takes_new_work:
            replicas.append(_row(member, numbering, wall_now - now))
        elif member.may_finish_work:
            no_new_work.append(_row(member, numbering, wall_now - now))
    return ReplicaList(replicas=replicas, timestamp=wall_now, no_new_work=no_new_work)


def _row(member: Member, numbering: ReplicaIds, wall_offset: float) -> ReplicaInfo:
    """Return a member's row. ``wall_offset``: what makes monotonic seconds into seconds since the epoch."""
    event = member.event
    return ReplicaInfo(
        input_addr=event.input_addr,
        output_addr=event.output_addr,
        stage_id=event.stage_id,
        status=event.status,
        queue_length=event.queue_length,
        last_heartbeat=max(0.0, member.heard_at + wall_offset),
        registered_at=max(0.0, member.registered_at + wall_offset),
        incarnation=event.incarnation,
        control_addr=event.control_addr,
        replica_id=numbering.number_of(ReplicaKey.of(event)),
    )


MIN_INTERVAL = 0.1
KEEP_ALIVE_INTERVAL = 5.0


class PublishSchedule:
    """Coalesces requests to publish: at most one per interval, at least one per 5 s. Times are monotonic seconds."""

    def __init__(self, now: float, quiet_until: float, min_interval: float = MIN_INTERVAL) -> None:
        """Start at ``now``, holding everything back until ``quiet_until``."""
        self._min_interval = min_interval
        self._allowed_at = quiet_until
        self._keep_alive_at = max(quiet_until, now + KEEP_ALIVE_INTERVAL)
        self._requested = quiet_until > now

    @property
    def due_at(self) -> float:
        """When the next list must go out."""
        return self._allowed_at if self._requested else self._keep_alive_at

    def request(self, now: float) -> bool:
        """Ask for a list; return whether it may go out now (True) or joins a later one (False)."""
        self._requested = True
        return now >= self._allowed_at

    def published(self, now: float) -> None:
        """Note that a list went out."""
        self._requested = False
        self._allowed_at = now + self._min_interval
        self._keep_alive_at = now + KEEP_ALIVE_INTERVAL
