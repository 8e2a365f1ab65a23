"""Requests that are charged to a replica and wait at the head until it can begin them."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from vllm_omni_plugin.admission import IndexedHeap, Ticket
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RECALLS = 4
"""Requests that are asked anew where they would go, when a replica has room and nobody waits for it."""
RECALL_S = 0.02
"""Seconds until a request that has waited for its replica rather than go elsewhere is asked again."""


class UnsentRun(NamedTuple):
    """One that waits.

    Attributes:
        member: the replica that it is charged to.
        request: what is to be sent to it.
        key: its place in the order.
    """

    member: PoolMember
    request: Any
    key: Any


class _MemberLine:
    """What waits for one replica, by groups of which all or none leave room for others: those of one tenant and class.

    The first of all is found in O(1); that of each further group costs as much as there are groups.

    Attributes:
        groups: those with something in them.
    """

    def __init__(self) -> None:
        self.groups: dict[Hashable, IndexedHeap[StageRun]] = {}
        self._firsts: IndexedHeap[Hashable] = IndexedHeap()

    def __iter__(self) -> Iterator[StageRun]:
        return (run for order in self.groups.values() for run in order)

    def add(self, run: StageRun, key: Any) -> None:
        group = _group(key)
        self.groups.setdefault(group, IndexedHeap()).add(run, key)
        self._note_first(group)

    def discard(self, run: StageRun, key: Any) -> None:
        group = _group(key)
        self.groups[group].discard(run)
        self._note_first(group)

    def firsts(self) -> Iterator[tuple[Any, StageRun]]:
        """The first of each group with its key, in order."""
        first = self._firsts.first()
        if first is None:
            return
        yield self._first_of(first[1])
        if len(self._firsts) > 1:
            for group in list(self._firsts)[1:]:
                yield self._first_of(group)

    def _first_of(self, group: Hashable) -> tuple[Any, StageRun]:
        first = self.groups[group].first()
        assert first is not None
        return first

    def _note_first(self, group: Hashable) -> None:
        first = self.groups[group].first()
        if first is None:
            del self.groups[group]
            self._firsts.discard(group)
        else:
            self._firsts.add(group, first[0])


def _group(key: Any) -> Hashable:
    return (key.tenant.name, key.class_name) if isinstance(key, Ticket) else None


class UnsentQueue:
    """The requests of one stage that wait at this head, in an order that is the same for all replicas.

    Each is charged to a replica, as the policy chose, and sent when that one has room: so a policy sees all there is to
    do, as if everything were sent at once, and which of the waiting goes first, whether it goes elsewhere, or is
    refused, is decided as late as can be.

    Args:
        leaves_headroom: whether a run leaves room for others at its replica; those that do not overtake those that do.
    """

    def __init__(self, leaves_headroom: Callable[[StageRun], bool]) -> None:
        self._leaves_headroom = leaves_headroom
        self._waiting: dict[StageRun, UnsentRun] = {}
        self._by_member: dict[PoolMember, _MemberLine] = {}
        # First those that were not asked yet whether they go elsewhere, then the others, by when they were asked.
        self._recalls: IndexedHeap[StageRun] = IndexedHeap()
        # Those that need not leave room for others, as far as was known when they were asked last.
        self._unyielding_recalls: IndexedHeap[StageRun] = IndexedHeap()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, run: StageRun) -> bool:
        return run in self._waiting

    @property
    def any_leaves_headroom(self) -> bool:
        """Whether some wait that leave room for others and may go to another replica, as far as was known last."""
        return len(self._recalls) > 0

    def add(self, run: StageRun, waiting: UnsentRun, recallable: bool = True) -> None:
        """It waits from here on.

        Args:
            run: of whom nothing is at an engine.
            waiting: for whom, with what and where in the order.
            recallable: whether it may go to another replica.
        """
        self._waiting[run] = waiting
        self._by_member.setdefault(waiting.member, _MemberLine()).add(run, waiting.key)
        if recallable:
            recalls = self._recalls if self._leaves_headroom(run) else self._unyielding_recalls
            recalls.add(run, (0.0, waiting.key))

    def take(self, run: StageRun) -> UnsentRun | None:
        """It waits no longer. Returns what it waited for, None if it did not wait."""
        waiting = self._waiting.pop(run, None)
        if waiting is not None:
            line = self._by_member[waiting.member]
            line.discard(run, waiting.key)
            if not line.groups:
                del self._by_member[waiting.member]
            self._recalls.discard(run)
            self._unyielding_recalls.discard(run)
        return waiting

    def first_of(self, member: PoolMember) -> StageRun | None:
        """The next one that a replica is to get, None if nobody waits for it."""
        return next((run for _, run in self._firsts(member)), None)

    def is_behind(self, run: StageRun, member: PoolMember, key: Any) -> bool:
        """Whether somebody waits for a replica that goes before this one, which would have this place in the order."""
        leaves_headroom = self._leaves_headroom(run)
        for place, first in self._firsts(member):
            if place > key:
                return False
            if leaves_headroom or not self._leaves_headroom(first):
                return True
        return False

    def ready(self, member: PoolMember, may_go: Callable[[StageRun], bool]) -> Iterator[tuple[StageRun, UnsentRun]]:
        """Take those that wait for a replica, one by one, as long as they may go; each is to be sent at once."""
        while (run := self._first_to_go(member, may_go)) is not None:
            waiting = self.take(run)
            assert waiting is not None
            yield run, waiting

    def _first_to_go(self, member: PoolMember, may_go: Callable[[StageRun], bool]) -> StageRun | None:
        for _, run in self._firsts(member):
            if may_go(run):
                return run
            if not self._leaves_headroom(run):
                # Nobody overtakes it.
                return None
        return None

    def _firsts(self, member: PoolMember) -> Iterator[tuple[Any, StageRun]]:
        line = self._by_member.get(member)
        return iter(()) if line is None else line.firsts()

    def of(self, member: PoolMember) -> list[StageRun]:
        """All that wait for a replica, in order."""
        line = self._by_member.get(member)
        return [] if line is None else sorted(line, key=lambda run: self._waiting[run].key)

    def to_recall(self, now: float, most: int, yielding: bool) -> Iterator[StageRun]:
        """Those that may go to another replica, in order; each not again before `RECALL_S` have passed.

        Args:
            now: monotonic seconds.
            most: how many at most.
            yielding: whether, behind the others, those are asked, too, that leave room for others.
        """
        for _ in range(most):
            order = self._unyielding_recalls
            first = _due(order, now)
            if first is None and yielding:
                order = self._recalls
                first = _due(order, now)
            if first is None:
                return
            (_, key), run = first
            # As it is now: it may have been otherwise when it was asked last.
            leaves_headroom = self._leaves_headroom(run)
            order.discard(run)
            (self._recalls if leaves_headroom else self._unyielding_recalls).add(run, (now, key))
            if yielding or not leaves_headroom:
                yield run


def _due(recalls: IndexedHeap[StageRun], now: float) -> tuple[Any, StageRun] | None:
    first = recalls.first()
    return None if first is None or (first[0][0] and first[0][0] + RECALL_S > now) else first
