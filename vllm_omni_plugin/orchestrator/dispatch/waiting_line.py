"""Requests that are charged to a replica and wait at the head until it can begin them."""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, NamedTuple, TypeVar

from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RECALLS = 4
"""Requests that are asked anew where they would go, when a replica has room and nobody waits for it."""
RECALL_S = 0.02
"""Seconds until a request that has waited for its replica rather than go elsewhere is asked again."""
_FEW = 64

K = TypeVar("K", bound=Hashable)


class Order(Generic[K]):
    """A priority queue out of whose middle anything can be taken in O(1); all else is O(log n).

    What was taken out stays in the heap until it comes to the front, or until it is half of it.
    """

    def __init__(self) -> None:
        self._keys: dict[K, Any] = {}
        self._heap: list[tuple[Any, int, K]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[K]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def add(self, item: K, key: Any) -> None:
        """Put an item in, or to another place. Equal keys keep the order in which they came."""
        self._added += 1
        self._keys[item] = place = (key, self._added)
        heappush(self._heap, (*place, item))
        if len(self._heap) > 2 * len(self._keys) + _FEW:
            self._heap = [(*place, item) for item, place in self._keys.items()]
            heapify(self._heap)

    def discard(self, item: K) -> None:
        """Take an item out, if it is there."""
        self._keys.pop(item, None)

    def first(self) -> tuple[Any, K] | None:
        """The lowest key and its item, which stays; None if there is nothing."""
        heap, keys = self._heap, self._keys
        while heap:
            key, added, item = heap[0]
            if keys.get(item) == (key, added):
                return key, item
            heappop(heap)
        return None


class Waiting(NamedTuple):
    """One that waits.

    Attributes:
        member: the replica that it is charged to.
        request: what is to be sent to it.
        key: its place in the order.
    """

    member: PoolMember
    request: Any
    key: Any


class WaitingLine:
    """The requests of one stage that wait at this head, in an order that is the same for all replicas.

    Each is charged to a replica, as the policy chose, and sent when that one has room: so a policy sees all there is to
    do, as if everything were sent at once, and which of the waiting goes first, whether it goes elsewhere, or is
    refused, is decided as late as can be.
    """

    def __init__(self) -> None:
        self._waiting: dict[StageRun, Waiting] = {}
        self._by_member: dict[PoolMember, Order[StageRun]] = {}
        # First those that were not asked yet whether they go elsewhere, then the others, by when they were asked.
        self._recalls: Order[StageRun] = Order()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, run: StageRun) -> bool:
        return run in self._waiting

    def add(self, run: StageRun, waiting: Waiting, recallable: bool = True) -> None:
        """It waits from here on.

        Args:
            run: of whom nothing is at an engine.
            waiting: for whom, with what and where in the order.
            recallable: whether it may go to another replica.
        """
        self._waiting[run] = waiting
        self._by_member.setdefault(waiting.member, Order()).add(run, waiting.key)
        if recallable:
            self._recalls.add(run, (0.0, waiting.key))

    def take(self, run: StageRun) -> Waiting | None:
        """It waits no longer. Returns what it waited for, None if it did not wait."""
        waiting = self._waiting.pop(run, None)
        if waiting is not None:
            order = self._by_member[waiting.member]
            order.discard(run)
            if not order:
                del self._by_member[waiting.member]
            self._recalls.discard(run)
        return waiting

    def first_of(self, member: PoolMember) -> StageRun | None:
        """The next one that a replica is to get, None if nobody waits for it."""
        order = self._by_member.get(member)
        first = None if order is None else order.first()
        return None if first is None else first[1]

    def ready(self, member: PoolMember, may_go: Callable[[StageRun], bool]) -> Iterator[tuple[StageRun, Waiting]]:
        """Take those that wait for a replica, one by one, as long as they may go; each is to be sent at once."""
        while (run := self.first_of(member)) is not None and may_go(run):
            waiting = self.take(run)
            assert waiting is not None
            yield run, waiting

    def of(self, member: PoolMember) -> list[StageRun]:
        """All that wait for a replica, in order."""
        return list(self._by_member.get(member, ()))

    def to_recall(self, now: float, most: int) -> Iterator[StageRun]:
        """Those that may go to another replica, in order; each not again before `RECALL_S` have passed."""
        for _ in range(most):
            first = self._recalls.first()
            if first is None or (first[0][0] and first[0][0] + RECALL_S > now):
                return
            (_, key), run = first
            self._recalls.add(run, (now, key))
            yield run
