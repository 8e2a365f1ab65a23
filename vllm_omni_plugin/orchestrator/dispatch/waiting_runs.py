"""The runs of one stage that no replica has: why each waits, its place in order, and when its wait ends."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from heapq import merge
from math import inf
from typing import Any, NamedTuple

from vllm_omni_plugin.admission import IndexedHeap, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.stage_run import LostReplica, StageRun

Choice = tuple[PoolMember, Decision]
"""A replica, and why it was chosen."""
MAX_GROUPS = 16
"""Tenants and classes that are looked at for one replica, the first ones in order. A tenant within its share is among
the first of its class: its next request starts before those of tenants that have used more."""


class WaitReason(Enum):
    """Why a run waits, and with that how its wait ends when its time is over, see `next_step`."""

    NO_REPLICA = "no replica serves"
    """Refused after `--omni-replica-wait`."""
    CONFINED = "no replica serves of those that crashed under it"
    """The same."""
    MOVING = "its replica is lost"
    """Until the head may move it, see `MoveBudget`."""
    RETURNED = "its replica has not got it, or has refused it"
    """Until the next decision."""
    PAUSED = "all engines are paused"
    """Until the end of the pause."""
    SUSPECT = "it may have crashed an engine, and other suspects are everywhere"
    """Sent nevertheless after `MAX_APART_WAIT_S`."""
    QUEUED = "no replica has room"
    """Only with admission control, in the order of the tickets."""


HELD = (WaitReason.NO_REPLICA, WaitReason.CONFINED)
"""The reasons of runs that wait for a replica to serve."""


class Place(NamedTuple):
    """Where a run waits, and since when. A queued one `wants` a replica, or None: any."""

    reason: WaitReason
    since: float
    wants: Choice | None = None


class WaitingRuns:
    """Each run waits once, for one reason. A run with a ticket also ends at its deadline, whatever it waits for.

    Adding, removing and finding the next one costs O(log n), whatever the number of tenants. Holds no decision: see
    `next_step`.
    """

    def __init__(self) -> None:
        self._places: dict[StageRun, Place] = {}
        self._in_order: dict[WaitReason, dict[StageRun, None]] = {reason: {} for reason in WaitReason}
        # Queued runs by the id of the replica that they wait for; None: any.
        self._lines: defaultdict[int | None, _Line] = defaultdict(_Line)
        # Confined runs by each replica to which they may go.
        self._confined: defaultdict[LostReplica, dict[StageRun, None]] = defaultdict(dict)
        self._ends: IndexedHeap[StageRun] = IndexedHeap()

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self, run: StageRun, reason: WaitReason, now: float, wait: float = inf, wants: Choice | None = None
    ) -> float:
        """Let a run wait for some seconds at most. Returns when that ends. A queued run must have a ticket."""
        self.remove(run)
        self._places[run] = Place(reason, now, wants)
        self._in_order[reason][run] = None
        if reason is WaitReason.QUEUED:
            assert run.ticket is not None
            line = self._lines[_wanted_id(wants)]
            line.add(run.ticket, run)
            line.tokens += _tokens(run, wants)
        elif reason is WaitReason.CONFINED:
            for replica in run.confined_to:
                self._confined[replica][run] = None
        ends_at = min(now + wait, deadline(run))
        if ends_at < inf:
            self._ends.add(run, ends_at)
        return ends_at

    def remove(self, run: StageRun) -> Place | None:
        """Remove a run. Returns None if it does not wait."""
        place = self._places.pop(run, None)
        if place is None:
            return None
        del self._in_order[place.reason][run]
        if place.reason is WaitReason.QUEUED:
            assert run.ticket is not None
            wanted = _wanted_id(place.wants)
            line = self._lines[wanted]
            line.remove(run.ticket)
            line.tokens -= _tokens(run, place.wants)
            if not line.groups:
                del self._lines[wanted]
        elif place.reason is WaitReason.CONFINED:
            for replica in run.confined_to:
                del self._confined[replica][run]
                if not self._confined[replica]:
                    del self._confined[replica]
        self._ends.discard(run)
        return place

    def place(self, run: StageRun) -> Place:
        return self._places[run]

    def count(self, *reasons: WaitReason) -> int:
        return sum(len(self._in_order[reason]) for reason in reasons)

    def runs(self, reason: WaitReason) -> Iterator[StageRun]:
        """In order of arrival."""
        return iter(self._in_order[reason])

    def first(self, reason: WaitReason) -> StageRun | None:
        return next(iter(self._in_order[reason]), None)

    def first_confined_to(self, members: Iterable[PoolMember]) -> StageRun | None:
        """A confined run that may go to one of these replicas, the first one there."""
        if not self._confined:
            return None
        return next((next(iter(self._confined[member])) for member in members if member in self._confined), None)

    def first_end(self) -> tuple[float, StageRun] | None:
        """The run whose wait ends first, and when."""
        return self._ends.first()

    def waiting_for(self, member: PoolMember) -> list[StageRun]:
        """The queued runs that wait for one replica, in order."""
        line = self._lines.get(member.replica_id)
        return [] if line is None else line.runs()

    def tokens_for(self, member: PoolMember) -> int:
        """Prompt tokens that a replica would compute for the queued runs that wait for it."""
        line = self._lines.get(member.replica_id)
        return 0 if line is None else line.tokens

    def queued_for(self, member: PoolMember, others: bool = False) -> Iterator[tuple[Ticket, StageRun]]:
        """The runs that queue for a replica, or for others, in order: the first one of each tenant and class."""
        wanted = (None, member.replica_id)
        lines = [line for name, line in self._lines.items() if (name in wanted) is not others]
        return merge(*(line.firsts() for line in lines))


class _Line:
    """Queued runs in the order of their tickets, by tenant and class: such a group is over its share or is not."""

    def __init__(self) -> None:
        self.tokens = 0
        self.groups: dict[Hashable, list[tuple[Ticket, StageRun]]] = {}
        # The first of each group, in order.
        self._firsts: list[tuple[Ticket, StageRun]] = []

    def add(self, ticket: Ticket, run: StageRun) -> None:
        group = self.groups.setdefault(_group(ticket), [])
        if group and group[0][0] < ticket:
            insort(group, (ticket, run))
            return
        if group:
            self._remove_first(group[0][0])
        group.insert(0, (ticket, run))
        insort(self._firsts, group[0])

    def remove(self, ticket: Ticket) -> None:
        name = _group(ticket)
        group = self.groups[name]
        place = bisect_left(group, ticket, key=_ticket_of)
        del group[place]
        if place == 0:
            self._remove_first(ticket)
            if group:
                insort(self._firsts, group[0])
            else:
                del self.groups[name]

    def firsts(self) -> list[tuple[Ticket, StageRun]]:
        return self._firsts[:MAX_GROUPS]

    def runs(self) -> list[StageRun]:
        return [run for _, run in merge(*self.groups.values())]

    def _remove_first(self, ticket: Ticket) -> None:
        del self._firsts[bisect_left(self._firsts, ticket, key=_ticket_of)]


def deadline(run: StageRun) -> float:
    """Monotonic seconds at which a run that no engine has is refused, because its first token would come too late.

    If an engine had the run, it has until the deadline of its first token: the time lost there is not its fault.
    """
    ticket = run.ticket
    if ticket is None or run.produced:
        return inf
    return ticket.send_by if run.first_sent_at is None else ticket.deadline


def _group(ticket: Ticket) -> Hashable:
    return ticket.tenant.name, ticket.class_name


def _ticket_of(entry: tuple[Ticket, Any]) -> Ticket:
    return entry[0]


def _tokens(run: StageRun, wants: Choice | None) -> int:
    return run.prompt_tokens - (0 if wants is None else wants[1].matched_tokens)


def _wanted_id(wants: Choice | None) -> int | None:
    return None if wants is None else wants[0].replica_id
