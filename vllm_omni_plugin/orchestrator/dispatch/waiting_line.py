"""Requests that are charged to a replica and wait at the head until it can begin them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vllm_omni_plugin.admission import Order
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RECALLS = 4
"""Requests that are asked anew where they would go, when a replica has room and nobody waits for it."""
RECALL_S = 0.02
"""Seconds until a request that has waited for its replica rather than go elsewhere is asked again."""


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

    Args:
        yields: whether a run leaves room for others at its replica; those that do not overtake those that do.
    """

    def __init__(self, yields: Callable[[StageRun], bool]) -> None:
        self._yields = yields
        self._waiting: dict[StageRun, Waiting] = {}
        self._by_member: dict[PoolMember, Order[StageRun]] = {}
        # Of these, those that need not leave room for others, as far as was known when they began to wait.
        self._unyielding: dict[PoolMember, Order[StageRun]] = {}
        # First those that were not asked yet whether they go elsewhere, then the others, by when they were asked.
        self._recalls: Order[StageRun] = Order()
        self._unyielding_recalls: Order[StageRun] = Order()

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
        recalls = self._recalls
        if not self._yields(run):
            self._unyielding.setdefault(waiting.member, Order()).add(run, waiting.key)
            recalls = self._unyielding_recalls
        if recallable:
            recalls.add(run, (0.0, waiting.key))

    def take(self, run: StageRun) -> Waiting | None:
        """It waits no longer. Returns what it waited for, None if it did not wait."""
        waiting = self._waiting.pop(run, None)
        if waiting is not None:
            for orders in (self._by_member, self._unyielding):
                _discard(orders, waiting.member, run)
            self._recalls.discard(run)
            self._unyielding_recalls.discard(run)
        return waiting

    def first_of(self, member: PoolMember) -> StageRun | None:
        """The next one that a replica is to get, None if nobody waits for it."""
        order = self._by_member.get(member)
        first = None if order is None else order.first()
        return None if first is None else first[1]

    def is_behind(self, run: StageRun, member: PoolMember, key: Any) -> bool:
        """Whether somebody waits for a replica that goes before this one, which would have this place in the order."""
        order = (self._by_member if self._yields(run) else self._unyielding).get(member)
        first = None if order is None else order.first()
        return first is not None and first[0] <= key

    def ready(self, member: PoolMember, may_go: Callable[[StageRun], bool]) -> Iterator[tuple[StageRun, Waiting]]:
        """Take those that wait for a replica, one by one, as long as they may go; each is to be sent at once."""
        while (run := self._first_to_go(member, may_go)) is not None:
            waiting = self.take(run)
            assert waiting is not None
            yield run, waiting

    def _first_to_go(self, member: PoolMember, may_go: Callable[[StageRun], bool]) -> StageRun | None:
        first = self.first_of(member)
        if first is None or may_go(first):
            return first
        order = self._unyielding.get(member)
        while order is not None and (entry := order.first()) is not None:
            run = entry[1]
            if not self._yields(run):
                return run if may_go(run) else None
            # It did not when it began to wait.
            order.discard(run)
        return None

    def of(self, member: PoolMember) -> list[StageRun]:
        """All that wait for a replica, in order."""
        return list(self._by_member.get(member, ()))

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
            if order is self._unyielding_recalls and self._yields(run):
                # It did not when it began to wait.
                order.discard(run)
                order = self._recalls
            order.add(run, (now, key))
            if order is self._unyielding_recalls or yielding:
                yield run


def _due(recalls: Order[StageRun], now: float) -> tuple[Any, StageRun] | None:
    first = recalls.first()
    return None if first is None or (first[0][0] and first[0][0] + RECALL_S > now) else first


def _discard(orders: dict[PoolMember, Order[StageRun]], member: PoolMember, run: StageRun) -> None:
    order = orders.get(member)
    if order is not None:
        order.discard(run)
        if not order:
            del orders[member]
