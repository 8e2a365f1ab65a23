"""The list of replicas: for heads whole once and then only what changes, for subscribers whole each time."""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaInfo, ReplicaKey, ReplicaList
from vllm_omni_plugin.coordinator.protocol.head_messages import FullList, ListDelta, Numbers, encode_to_head
from vllm_omni_plugin.coordinator.state.membership_table import Change, Member, MembershipTable
from vllm_omni_plugin.coordinator.state.numbering import Numbering


class ListDeltas:
    """One delta after the other. A full list is that of the last delta, never ahead of it.

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
        self._timestamp = 0.0
        self._takes_work: dict[ReplicaKey, ReplicaInfo] = {}
        self._held_back: dict[ReplicaKey, ReplicaInfo] = {}
        self._encoded: Raw | None = None

    def note(self, changes: Iterable[Change]) -> bool:
        """Note what changed in the table; return whether there is something for the next delta."""
        for change in changes:
            if change.alters_list:
                self._touched.add(ReplicaKey.of(change.member.event))
            if change.forgotten is not None:
                self._numbering.release(ReplicaKey.of(change.forgotten.event))
        return bool(self._touched)

    def reserve(self, numbers: Numbers) -> None:
        """Keep the numbers that replicas had before this coordinator. Once there is a first list it is too late."""
        if not self.has_begun:
            self._numbering.reserve(numbers.numbers)

    def full(self) -> Raw | None:
        """Return the last list as a `FullList`, or None if there was none yet."""
        if self._encoded is None and self.has_begun:
            rows, held_back = self._takes_work.values(), self._held_back.values()
            full = FullList(list(rows), list(held_back), self._timestamp)
            self._encoded = encode_to_head(full)
        return self._encoded

    def revise(self, now: float, wall_now: float) -> Raw | None:
        """Return what changed since the last time, for heads that have the last list; None if nothing did.

        The first time it is the whole list. ``now`` and ``wall_now`` are one moment in monotonic and in wall-clock
        seconds.
        """
        delta = self._change(wall_now - now, wall_now)
        is_first, self.has_begun = not self.has_begun, True
        if is_first:
            self._numbering.end_reservations()
        elif not (delta.replicas or delta.no_new_work or delta.removed):
            return None
        self._timestamp = wall_now
        self._encoded = None
        return self.full() if is_first else encode_to_head(delta)

    def _change(self, wall_offset: float, timestamp: float) -> ListDelta:
        delta = ListDelta([], [], [], timestamp)
        for key in self._touched:
            member = self._table.get(key)
            was_listed = key in self._takes_work or key in self._held_back
            self._takes_work.pop(key, None)
            self._held_back.pop(key, None)
            if member is not None and member.takes_new_work:
                self._takes_work[key] = _row(member, self._numbering, wall_offset)
                delta.replicas.append(self._takes_work[key])
            elif member is not None and member.may_finish_work:
                self._held_back[key] = _row(member, self._numbering, wall_offset)
                delta.no_new_work.append(self._held_back[key])
            elif was_listed:
                delta.removed.append(key)
        self._touched.clear()
        return delta


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
