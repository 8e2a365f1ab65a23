"""Runs that are charged to a replica and wait at the head until the replica has room for them."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from vllm_omni_plugin.admission import IndexedHeap, Ticket
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RECALLS = 4
"""Runs that are offered to another replica at once, when that replica has room."""
RECALL_INTERVAL_S = 0.02
"""Seconds until a run that stayed with its replica is offered again."""


class UnsentRun(NamedTuple):
    """A run in the queue.

    Attributes:
        member: the replica that the run is charged to.
        request: what is to be sent.
        key: the run's place in the order.
    """

    member: PoolMember
    request: Any
    key: Any


class _ReplicaQueue:
    """The unsent runs of one replica, by tenant and class: all runs of such a group are over their share, or none is.

    The first of all runs is found in O(1); the first of each further group costs as much as there are groups.
    """

    def __init__(self) -> None:
        self.groups: dict[Hashable, IndexedHeap[StageRun]] = {}
        self._firsts: IndexedHeap[Hashable] = IndexedHeap()

    def __iter__(self) -> Iterator[StageRun]:
        return (run for group in self.groups.values() for run in group)

    def add(self, run: StageRun, key: Any) -> None:
        name = _group_name(key)
        self.groups.setdefault(name, IndexedHeap()).add(run, key)
        self._update_first(name)

    def discard(self, run: StageRun, key: Any) -> None:
        name = _group_name(key)
        self.groups[name].discard(run)
        self._update_first(name)

    def firsts(self) -> Iterator[tuple[Any, StageRun]]:
        """The first run of each group with its key, in order."""
        first = self._firsts.first()
        if first is None:
            return
        yield self._first_of(first[1])
        if len(self._firsts) > 1:
            for name in list(self._firsts)[1:]:
                yield self._first_of(name)

    def _first_of(self, name: Hashable) -> tuple[Any, StageRun]:
        first = self.groups[name].first()
        assert first is not None
        return first

    def _update_first(self, name: Hashable) -> None:
        first = self.groups[name].first()
        if first is None:
            del self.groups[name]
            self._firsts.discard(name)
        else:
            self._firsts.add(name, first[0])


def _group_name(key: Any) -> Hashable:
    return (key.tenant.name, key.class_name) if isinstance(key, Ticket) else None


class UnsentQueue:
    """The unsent runs of one stage, in an order that is the same for all replicas.

    Each run is charged to a replica, as the policy chose, and sent when the replica has room. So a policy sees all
    work, and which run goes first, goes elsewhere or is refused is decided only then. Runs within their share overtake
    over-share runs.

    Args:
        is_over_share: whether a run is over its share. It may change while the run waits.
    """

    def __init__(self, is_over_share: Callable[[StageRun], bool]) -> None:
        self._is_over_share = is_over_share
        self._unsent: dict[StageRun, UnsentRun] = {}
        self._by_member: dict[PoolMember, _ReplicaQueue] = {}
        # Runs that may be recalled, by when they were offered last (0: never) and by their order. A run is in the heap
        # of the share that it had then.
        self._over_share_recalls: IndexedHeap[StageRun] = IndexedHeap()
        self._in_share_recalls: IndexedHeap[StageRun] = IndexedHeap()

    def __len__(self) -> int:
        return len(self._unsent)

    def __contains__(self, run: StageRun) -> bool:
        return run in self._unsent

    @property
    def has_over_share(self) -> bool:
        """Whether over-share runs wait that may be recalled, as far as was known when they were offered last."""
        return len(self._over_share_recalls) > 0

    def add(self, run: StageRun, unsent: UnsentRun, recallable: bool = True) -> None:
        """Add a run of which no engine has anything; `recallable`: it may go to another replica."""
        self._unsent[run] = unsent
        self._by_member.setdefault(unsent.member, _ReplicaQueue()).add(run, unsent.key)
        if recallable:
            self._recalls_of(run).add(run, (0.0, unsent.key))

    def remove(self, run: StageRun) -> UnsentRun | None:
        """Remove a run. Returns None if it is not in the queue."""
        unsent = self._unsent.pop(run, None)
        if unsent is not None:
            queue = self._by_member[unsent.member]
            queue.discard(run, unsent.key)
            if not queue.groups:
                del self._by_member[unsent.member]
            self._over_share_recalls.discard(run)
            self._in_share_recalls.discard(run)
        return unsent

    def first_of(self, member: PoolMember) -> StageRun | None:
        return next((run for _, run in self._firsts(member)), None)

    def is_behind(self, run: StageRun, member: PoolMember, key: Any) -> bool:
        """Whether another run of a replica goes before this run, which would have this place in the order."""
        over_share = self._is_over_share(run)
        for first_key, first in self._firsts(member):
            if first_key > key:
                return False
            if over_share or not self._is_over_share(first):
                return True
        return False

    def take_sendable(
        self, member: PoolMember, may_send: Callable[[StageRun], bool]
    ) -> Iterator[tuple[StageRun, UnsentRun]]:
        """Remove the runs of a replica that may be sent, one by one. Each must be sent before the next is asked for."""
        while (run := self._first_sendable(member, may_send)) is not None:
            unsent = self.remove(run)
            assert unsent is not None
            yield run, unsent

    def _first_sendable(self, member: PoolMember, may_send: Callable[[StageRun], bool]) -> StageRun | None:
        for _, run in self._firsts(member):
            if may_send(run):
                return run
            if not self._is_over_share(run):
                # No run overtakes it.
                return None
        return None

    def _firsts(self, member: PoolMember) -> Iterator[tuple[Any, StageRun]]:
        queue = self._by_member.get(member)
        return iter(()) if queue is None else queue.firsts()

    def runs_of(self, member: PoolMember) -> list[StageRun]:
        queue = self._by_member.get(member)
        return [] if queue is None else sorted(queue, key=lambda run: self._unsent[run].key)

    def next_recalls(self, now: float, most: int, over_share: bool) -> Iterator[StageRun]:
        """Runs to be offered to another replica, at most so many, and each once in `RECALL_INTERVAL_S`.

        Args:
            now: monotonic seconds.
            most: how many heap entries are looked at.
            over_share: whether over-share runs are offered, too, behind the others.
        """
        for _ in range(most):
            heap = self._in_share_recalls
            first = _due(heap, now)
            if first is None and over_share:
                heap = self._over_share_recalls
                first = _due(heap, now)
            if first is None:
                return
            (_, key), run = first
            heap.discard(run)
            # The run's share may have changed since it was offered last.
            current = self._recalls_of(run)
            current.add(run, (now, key))
            if over_share or current is self._in_share_recalls:
                yield run

    def _recalls_of(self, run: StageRun) -> IndexedHeap[StageRun]:
        return self._over_share_recalls if self._is_over_share(run) else self._in_share_recalls


def _due(heap: IndexedHeap[StageRun], now: float) -> tuple[Any, StageRun] | None:
    first = heap.first()
    return None if first is None or (first[0][0] and first[0][0] + RECALL_INTERVAL_S > now) else first
