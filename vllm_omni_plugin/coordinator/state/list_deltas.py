"""The list of replicas as heads are told of it: whole once, then only what changes."""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaInfo, ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import FullList, ListDelta, Numbers
from vllm_omni_plugin.coordinator.protocol.head_wire import encode_to_head
from vllm_omni_plugin.coordinator.state.membership_table import Change, MembershipTable
from vllm_omni_plugin.coordinator.state.numbering import Numbering
from vllm_omni_plugin.coordinator.state.snapshot import row_of


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
        changed = self._change(wall_now - now)
        if self.has_begun and not any(changed):
            return None
        is_first, self.has_begun = not self.has_begun, True
        self._timestamp = wall_now
        self._encoded = None
        if is_first:
            self._numbering.end_reservations()
            return self.full()
        return encode_to_head(ListDelta(*changed, wall_now))

    def _change(self, wall_offset: float) -> tuple[list[ReplicaInfo], list[ReplicaInfo], list[tuple[int, str, str]]]:
        replicas: list[ReplicaInfo] = []
        no_new_work: list[ReplicaInfo] = []
        removed: list[tuple[int, str, str]] = []
        for key in self._touched:
            member = self._table.get(key)
            was_listed = key in self._takes_work or key in self._held_back
            self._takes_work.pop(key, None)
            self._held_back.pop(key, None)
            if member is not None and member.takes_new_work:
                self._takes_work[key] = row_of(member, self._numbering, wall_offset)
                replicas.append(self._takes_work[key])
            elif member is not None and member.may_finish_work:
                self._held_back[key] = row_of(member, self._numbering, wall_offset)
                no_new_work.append(self._held_back[key])
            elif was_listed:
                removed.append(key)
        self._touched.clear()
        return replicas, no_new_work, removed
