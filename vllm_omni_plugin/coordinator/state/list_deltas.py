"""The list of replicas: for heads whole once and then only what changes, for subscribers whole each time."""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaInfo, ReplicaKey, ReplicaList
from vllm_omni_plugin.coordinator.protocol.head_messages import FullList, ListDelta, Numbers, encode_to_head
from vllm_omni_plugin.coordinator.state.membership_table import Change, Member, MembershipTable
from vllm_omni_plugin.coordinator.state.numbering import Numbering


class ListDeltas:
    """What heads are told of a table. A delta has rows as they are now, so a full list may be ahead of the next one.

    Args:
        table: What is listed.
        numbering: The numbers of the rows.

    Attributes:
        has_begun: Whether there was a list yet.
    """

    def __init__(self, table: MembershipTable, numbering: Numbering) -> None:
        self._table = table
        self._numbering = numbering
        self._touched: set[ReplicaKey] = set()
        self.has_begun = False
        self._wall_offset = 0.0
        # Until a row changes: after the start of a coordinator all heads ask for it.
        self._full: Raw | None = None

    def note(self, changes: Iterable[Change]) -> bool:
        """Note what changed in the table; return whether there is something for the next delta."""
        for change in changes:
            if change.alters_list:
                self._touched.add(ReplicaKey.of(change.member.event))
                self._full = None
            if change.forgotten is not None:
                self._numbering.release(ReplicaKey.of(change.forgotten.event))
        return bool(self._touched)

    def reserve(self, numbers: Numbers) -> None:
        """Keep the numbers that replicas had before this coordinator. Once there is a first list it is too late."""
        if not self.has_begun:
            self._numbering.reserve(numbers.numbers)

    def full(self, now: float) -> Raw | None:
        """Return the whole list as a `FullList`, or None if there was no list yet. ``now``: monotonic seconds."""
        if self._full is None and self.has_begun:
            listed = replica_list(self._table, self._numbering, now, now + self._wall_offset)
            self._full = encode_to_head(FullList(listed.replicas, listed.timestamp, listed.no_new_work))
        return self._full

    def revise(self, now: float, wall_now: float) -> Raw | None:
        """Return what changed since the last time, for heads that have the last list; None if nothing did.

        The first time it is the whole list. ``now`` and ``wall_now`` are one moment in monotonic and in wall-clock
        seconds.
        """
        self._wall_offset = wall_now - now
        if not self.has_begun:
            self.has_begun = True
            self._touched.clear()
            full = self.full(now)
            self._numbering.end_reservations()
            return full
        if not self._touched:
            return None
        delta = ListDelta([], wall_now)
        for key in self._touched:
            member = self._table.get(key)
            if member is not None and (member.takes_new_work or member.may_finish_work):
                rows = delta.replicas if member.takes_new_work else delta.no_new_work
                rows.append(_row(member, self._numbering, self._wall_offset))
            else:
                delta.removed.append(key)
        self._touched.clear()
        return encode_to_head(delta)


def replica_list(members: Iterable[Member], numbering: Numbering, now: float, wall_now: float) -> ReplicaList:
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


def _row(member: Member, numbering: Numbering, wall_offset: float) -> ReplicaInfo:
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
