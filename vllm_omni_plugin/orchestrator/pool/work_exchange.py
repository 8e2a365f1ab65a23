"""Reports of work between the heads of a fleet, so that each head knows a replica's whole load."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from vllm_omni_plugin.coordinator import (
    MAX_REPORTED_ADAPTERS,
    HeadLeft,
    HeadWork,
    ReplicaWork,
    SessionLost,
    Welcome,
    engine_key,
)
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.load_ledger import NO_WORK, Work

REPORT_INTERVAL_S = 0.04
"""Seconds between two reports. With the same delay at the coordinator, heads know each other's work within 0.1 s."""

HeadsUpdate = Welcome | HeadWork | HeadLeft | SessionLost
"""Messages to a head about other heads and their work."""
WorkChanges = list[tuple[PoolMember, Work | None]]
"""New totals of other heads' work at replicas; None: they do not report it, and the engines' reports count."""


class WorkExchange:
    """Reports this head's work to the others, and sums up what they report. Lives on the orchestrator's loop.

    A report has the current values of what changed since the report before, so any number of changes costs one row. The
    first report after a quiet time leaves as soon as the loop is free. While no other head is known, no report is made
    and the engines' reports count; the first other head gets everything: `report`, which must not block, gets the
    rows and whether they are complete.

    Other heads' work is also kept for replicas that this head is not attached to yet.
    """

    def __init__(
        self,
        report: Callable[[Sequence[ReplicaWork], bool], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
    ) -> None:
        self._report = report
        self._call_later = call_later or _call_later
        self._timer: asyncio.TimerHandle | None = None
        # All maps by `int` have an `engine_key` as the key, or a class's key, which no engine has.
        self._members: dict[int, PoolMember] = {}
        self._keys: dict[PoolMember, int] = {}
        # Returns this head's waiting work of a class.
        self._waiting: dict[int, Callable[[], Work]] = {}
        # Keys whose work may differ from the last report, in order.
        self._changed: dict[int, None] = {}
        self._all_wanted = False
        self._heads: dict[str, dict[int, Work]] = {}
        # The sums over `_heads`, without zeros.
        self._others: dict[int, Work] = {}

    @property
    def heads(self) -> int:
        """How many heads are known, this one included. May be read by any thread."""
        return len(self._heads) + 1

    @property
    def others(self) -> tuple[str, ...]:
        """Ids of the other heads that are known. May be read by any thread."""
        return tuple(self._heads)

    def add_member(self, member: PoolMember) -> Work | None:
        """A replica is about to serve. Returns the others' work there; None: they report none, as for a local one."""
        if not member.remote:
            return None
        key = self._keys[member] = member.engine_key
        self._members[key] = member
        return self._others_of(key)

    def changed(self, member: PoolMember) -> None:
        self._mark_changed(self._keys.get(member))

    def set_waiting(self, class_name: str, waiting: Callable[[], Work]) -> None:
        """This head's waiting work of a class may have changed; `waiting` returns it."""
        key = _class_key(class_name)
        self._waiting[key] = waiting
        self._mark_changed(key)

    def others_waiting(self, class_name: str) -> Work:
        """The other heads' waiting work of a class. May be read by any thread."""
        return self._others.get(_class_key(class_name), NO_WORK)

    def remove_member(self, member: PoolMember) -> None:
        key = self._keys.pop(member, None)
        if key is not None:
            self._members.pop(key, None)
        self._mark_changed(key)

    def handle(self, message: HeadsUpdate) -> WorkChanges:
        """Handle a message about other heads. Returns the changes of their work."""
        match message:
            case HeadWork():
                return self._head_work(message)
            case Welcome():
                # A session begins: the next report is complete.
                self._all_wanted = True
                self._wake()
                return self._forget([head_id for head_id in self._heads if head_id not in message.heads])
            case HeadLeft():
                return self._forget([message.head_id])
            case SessionLost():
                return self._forget(list(self._heads))

    def _head_work(self, message: HeadWork) -> WorkChanges:
        is_first = not self._heads
        known = self._heads.setdefault(message.head_id, {})
        if is_first:
            # Changes were not reported while no other head was known.
            self._all_wanted = True
            self._wake()
        rows = {row.engine: Work(row.requests, row.prefill_tokens, row.adapters) for row in message.work}
        gone = [key for key in known if key not in rows] if message.full else []
        self._sum_up(known, rows | dict.fromkeys(gone, NO_WORK))
        return self._work_of_others(self._members if is_first else (*rows, *gone))

    def close(self) -> None:
        """Stop reporting. Idempotent."""
        self._forget(list(self._heads))
        if self._timer is not None:
            self._timer.cancel()

    def _forget(self, head_ids: Collection[str]) -> WorkChanges:
        touched: dict[int, Work] = {}
        for head_id in head_ids:
            known = self._heads.pop(head_id, {})
            touched |= known
            self._sum_up(known, dict.fromkeys(known, NO_WORK))
        return self._work_of_others(touched if self._heads else self._members)

    def _mark_changed(self, key: int | None) -> None:
        if self._heads and key is not None:
            self._changed[key] = None
            self._wake()

    def _wake(self) -> None:
        if self._timer is None:
            self._timer = self._call_later(0.0, self._report_changes)

    def _report_changes(self) -> None:
        self._timer = None
        full, self._all_wanted = self._all_wanted, False
        own = {key: self._own_of(key) for key in ((*self._members, *self._waiting) if full else self._changed)}
        rows = [_row(key, *work) for key, work in own.items() if not full or work != NO_WORK]
        self._changed.clear()
        if rows or full:
            self._timer = self._call_later(REPORT_INTERVAL_S, self._report_changes)
            self._report(rows, full)

    def _own_of(self, key: int) -> Work:
        if (waiting := self._waiting.get(key)) is not None:
            return waiting()
        member = self._members.get(key)
        return NO_WORK if member is None else member.ledger.own

    def _sum_up(self, known: dict[int, Work], rows: Mapping[int, Work]) -> None:
        for key, work in rows.items():
            before, others = known.get(key, NO_WORK), self._others.get(key, NO_WORK)
            _put(known, key, work)
            requests = others.requests + work.requests - before.requests
            tokens = others.prefill_tokens + work.prefill_tokens - before.prefill_tokens
            adapters = others.adapters
            if work.adapters != before.adapters:
                works = [head.get(key, NO_WORK) for head in self._heads.values()]
                adapters = tuple(dict.fromkeys(name for each in works for name in each.adapters))
            _put(self._others, key, Work(requests, tokens, adapters))

    def _work_of_others(self, keys: Iterable[int]) -> WorkChanges:
        return [(member, self._others_of(key)) for key in keys if (member := self._members.get(key)) is not None]

    def _others_of(self, key: int) -> Work | None:
        return self._others.get(key, NO_WORK) if self._heads else None


def _class_key(name: str) -> int:
    return engine_key(0, "waiting", name, 0)


def _row(key: int, requests: int, prefill_tokens: int, adapters: tuple[str, ...]) -> ReplicaWork:
    return ReplicaWork(key, requests, prefill_tokens, adapters[:MAX_REPORTED_ADAPTERS])


def _put(works: dict[int, Work], key: int, work: Work) -> None:
    if work == NO_WORK:
        works.pop(key, None)
    else:
        works[key] = work


def _call_later(seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, function)
