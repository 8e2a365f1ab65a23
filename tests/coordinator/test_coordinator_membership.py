"""The membership table, transition by transition; no clock but the argument."""

import math
from dataclasses import dataclass

import pytest
from coordinator_support import make_event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from vllm_omni_plugin.coordinator import (
    ReplicaEvent,
    ReplicaKey,
    ReplicaStatus,
)
from vllm_omni_plugin.coordinator.state.membership_table import (
    FORGET_AFTER_TIMEOUTS,
    Change,
    Liveness,
    Member,
    MembershipTable,
    TableFullError,
)

TIMEOUT = 10.0
FORGET_AFTER = FORGET_AFTER_TIMEOUTS * TIMEOUT
UP, DOWN, ERROR, DRAINING = ReplicaStatus


def table_of(*events: ReplicaEvent, max_replicas: int = 100) -> MembershipTable:
    table = MembershipTable(TIMEOUT, max_replicas)
    for event in events:
        assert table.apply(event, 0.0)
    return table


def row(table: MembershipTable, name: str = "a") -> Member:
    member = table.get(ReplicaKey.of(make_event(name)))
    assert member is not None
    return member


def livenesses(changes: list[Change]) -> list[Liveness]:
    return [change.member.liveness for change in changes]


A = make_event()
GONE = make_event(status=DOWN)


@pytest.mark.parametrize(
    ("before", "event", "alters_list", "registered_at"),
    [
        pytest.param([A], A, False, 0.0, id="the same again"),
        pytest.param([A], make_event(queue_length=3), True, 0.0, id="a queue length"),
        pytest.param([A], replace(A, control_addr="tcp://a:3"), True, 0.0, id="a control address"),
        pytest.param([A, GONE], A, True, 3.0, id="it left and is back"),
    ],
)
def test_what_one_event_changes(
    before: list[ReplicaEvent], event: ReplicaEvent, alters_list: bool, registered_at: float
) -> None:
    table = table_of(*before)
    change = table.apply(event, 3.0)
    assert change is not None
    assert (change.alters_list, row(table).registered_at) == (alters_list, registered_at)
    assert (row(table).event, row(table).last_event_at) == (event, 3.0)


def test_same_address_in_two_stages_is_two_replicas() -> None:
    table = table_of(make_event(stage_id=0), make_event(stage_id=1))
    table.apply(make_event(stage_id=1, status=DOWN), 1.0)
    assert len(table) == 2
    assert row(table).takes_new_work


def test_late_coordinator_extends_deadlines_instead_of_expiring_everyone() -> None:
    table = table_of(make_event("a"), make_event("b"))
    assert table.expire(1000.0, late_by=996.0) == []
    assert len([member for member in table if member.takes_new_work]) == 2
    assert livenesses(table.expire(1001.0)) == [Liveness.LATE] * 2
    # No event moves into the future.
    table = table_of(make_event())
    table.expire(3.0, late_by=100.0)
    assert row(table).last_event_at == 3.0


def test_full_table_refuses_a_new_row_unless_it_can_replace_one_that_has_left() -> None:
    table = table_of(make_event("a"), make_event("b"), max_replicas=2)
    with pytest.raises(TableFullError, match="2 replicas"):
        table.apply(make_event("c"), 1.0)
    assert len(table) == 2
    assert table.apply(make_event("a", queue_length=1), 1.0)
    table.apply(make_event("b", status=DOWN), 1.0)
    assert table.apply(make_event("c"), 1.0) == Change(row(table, "c"))
    assert table.get(ReplicaKey.of(make_event("b"))) is None
    assert row(table, "a").takes_new_work


@dataclass
class Row:
    """What the table should know of a replica."""

    incarnation: int
    sequence: int
    status: ReplicaStatus
    joined_at: float
    heard_at: float
    liveness: Liveness = Liveness.ALIVE
    gone_at: float = math.inf

    def leave(self, liveness: Liveness, now: float) -> None:
        self.liveness, self.gone_at = liveness, now

    def deadline(self) -> float:
        silence = {Liveness.ALIVE: TIMEOUT / 2, Liveness.LATE: TIMEOUT}.get(self.liveness)
        return self.gone_at + FORGET_AFTER if silence is None else self.heard_at + silence


class Histories(RuleBasedStateMachine):
    """Replicas report in any order, leave and fall silent. The table knows of each what it should."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of()
        self.rows: dict[str, Row] = {}
        self.now = 0.0

    @rule(
        name=st.sampled_from("ab"),
        status=st.sampled_from(ReplicaStatus),
        incarnation=st.integers(0, 2),
        sequence=st.integers(0, 3),
        authoritative=st.booleans(),
    )
    def report(self, name: str, status: ReplicaStatus, incarnation: int, sequence: int, authoritative: bool) -> None:
        event = make_event(name, status=status, incarnation=incarnation, sequence=sequence)
        change = self.table.apply(event, self.now, authoritative=authoritative)
        row = self.rows.get(name)
        if row is None:
            assert (change is None) is (status is DOWN)
            if change:
                self.rows[name] = Row(incarnation, sequence, status, self.now, self.now)
            return
        if authoritative and not incarnation:
            incarnation, sequence = row.incarnation, row.sequence
        else:
            is_newer = (incarnation, sequence) > (row.incarnation, row.sequence)
            repeats = incarnation == row.incarnation and sequence == row.sequence == 0
            assert (change is not None) is (is_newer or repeats)
            if change is None:
                return
        left = row.liveness is Liveness.LEFT
        if status is DOWN:
            if not left:
                row.heard_at = self.now
                row.leave(Liveness.LEFT, self.now)
        else:
            row.joined_at = self.now if left or incarnation != row.incarnation else row.joined_at
            row.heard_at, row.liveness = self.now, Liveness.ALIVE
        row.incarnation, row.sequence, row.status = incarnation, sequence, status

    @rule(seconds=st.floats(0.01, 60), at_deadline=st.booleans())
    def pass_time(self, seconds: float, at_deadline: bool) -> None:
        """By any time, or to the next deadline: then something changes."""
        deadline = self.table.next_deadline()
        assert deadline == min((row.deadline() for row in self.rows.values()), default=None)
        self.now = deadline if at_deadline and deadline is not None else self.now + seconds
        changes = self.table.expire(self.now)
        assert bool(changes) is (deadline is not None and deadline <= self.now)
        for name, row in list(self.rows.items()):
            if row.gone_at + FORGET_AFTER <= self.now and row.liveness in (Liveness.DEAD, Liveness.LEFT):
                del self.rows[name]
            if row.liveness is Liveness.ALIVE and row.deadline() <= self.now:
                row.liveness = Liveness.LATE
            if row.liveness is Liveness.LATE and row.deadline() <= self.now:
                row.leave(Liveness.DEAD, self.now)

    @invariant()
    def each_row_is_as_it_should_be(self) -> None:
        known = {member.event.input_addr: member for member in self.table}
        assert len(self.table) == len(known) == len(self.rows)
        for name, row in self.rows.items():
            member = known[f"tcp://{name}:1"]
            assert (member.liveness, member.registered_at, member.last_event_at) == (
                row.liveness,
                row.joined_at,
                row.heard_at,
            )
            event = member.event
            assert (event.incarnation, event.sequence, event.status) == (row.incarnation, row.sequence, row.status)
            present = row.liveness in (Liveness.ALIVE, Liveness.LATE)
            assert member.takes_new_work is (row.liveness is Liveness.ALIVE and row.status is UP)
            assert present or member.changed_at == row.gone_at
            assert member.may_finish_work is (present and row.status in (UP, DRAINING) and not member.takes_new_work)


TestHistories = Histories.TestCase
