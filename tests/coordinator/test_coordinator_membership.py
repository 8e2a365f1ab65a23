"""The membership table, transition by transition; no clock but the argument."""

import pytest
from coordinator_support import make_event
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_omni_plugin.coordinator import (
    ReplicaEvent,
    ReplicaKey,
    ReplicaStatus,
)
from vllm_omni_plugin.coordinator.state.membership_table import (
    Change,
    Liveness,
    Member,
    MembershipTable,
    TableFullError,
)

TIMEOUT = 10.0
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


def alters_list(change: Change | None) -> bool | None:
    """Whether heads see a change; None if there is none."""
    return None if change is None else change.alters_list


def livenesses(changes: list[Change]) -> list[Liveness]:
    return [change.member.liveness for change in changes]


A = make_event()
GONE = make_event(status=DOWN)
NUMBERED = make_event(incarnation=1, sequence=1)


@pytest.mark.parametrize(
    ("before", "event", "is_seen", "registered_at"),
    [
        pytest.param([], replace(A, event_type="heartbeat"), True, 3.0, id="a heartbeat joins"),
        pytest.param([], GONE, None, None, id="one unknown leaves"),
        pytest.param([A], A, False, 0.0, id="the same again"),
        pytest.param([A], make_event(queue_length=3), True, 0.0, id="a queue length"),
        pytest.param([A], replace(A, control_addr="tcp://a:3"), True, 0.0, id="a control address"),
        pytest.param([A, GONE], A, True, 3.0, id="it left and is back"),
        pytest.param([NUMBERED], GONE, None, 0.0, id="no number against a number"),
        pytest.param([NUMBERED], replace(GONE, incarnation=1), None, 0.0, id="no sequence against a number"),
    ],
)
def test_what_one_event_changes(
    before: list[ReplicaEvent], event: ReplicaEvent, is_seen: bool | None, registered_at: float | None
) -> None:
    table = table_of(*before)
    change = table.apply(event, 3.0)
    assert alters_list(change) is is_seen
    member = table.get(ReplicaKey.of(A))
    assert (member and member.registered_at) == registered_at
    if change is not None:
        assert (row(table).event, row(table).last_event_at) == (event, 3.0)


def test_error_then_up_under_a_new_incarnation_joins_anew() -> None:
    table = table_of(make_event(incarnation=1, sequence=9))
    table.apply(make_event(status=ERROR, incarnation=1, sequence=10), 1.0)
    assert not row(table).takes_new_work
    assert not row(table).may_finish_work
    change = table.apply(make_event(incarnation=2, sequence=1), 2.0)
    assert alters_list(change)
    assert row(table).registered_at == 2.0
    assert row(table).takes_new_work
    assert table.apply(make_event(status=ERROR, incarnation=1, sequence=11), 3.0) is None


def test_same_address_in_two_stages_is_two_replicas() -> None:
    table = table_of(make_event(stage_id=0), make_event(stage_id=1))
    table.apply(make_event(stage_id=1, status=DOWN), 1.0)
    assert len(table) == 2
    assert row(table).takes_new_work


def test_authoritative_removal_needs_no_numbers_and_replays_stay_refused() -> None:
    table = table_of(make_event(incarnation=5, sequence=7))
    assert alters_list(table.apply(make_event(status=DOWN), 1.0, authoritative=True))
    assert row(table).liveness is Liveness.LEFT
    assert table.apply(make_event(incarnation=5, sequence=7), 2.0) is None
    assert alters_list(table.apply(make_event(incarnation=5, sequence=8), 3.0))
    assert row(table).registered_at == 3.0


def test_replica_that_left_does_not_become_dead() -> None:
    table = table_of(make_event())
    assert alters_list(table.apply(make_event(status=DOWN), 1.0))
    assert alters_list(table.apply(make_event(status=DOWN), 2.0)) is False
    assert row(table).liveness is Liveness.LEFT
    assert table.expire(1.0 + 2 * TIMEOUT) == []
    assert row(table).liveness is Liveness.LEFT


def test_silent_replica_is_late_before_it_is_dead() -> None:
    table = table_of(make_event())
    assert table.expire(4.99) == []
    assert livenesses(table.expire(5.0)) == [Liveness.LATE]
    assert (row(table).takes_new_work, row(table).may_finish_work) == (False, True)
    assert table.expire(9.99) == []
    assert livenesses(table.expire(10.0)) == [Liveness.DEAD]
    assert (row(table).takes_new_work, row(table).may_finish_work) == (False, False)


@pytest.mark.parametrize("silent_for", [6.0, TIMEOUT], ids=["late", "dead"])
def test_silent_replica_that_sends_a_new_event_recovers(silent_for: float) -> None:
    table = table_of(make_event(incarnation=1, sequence=1))
    table.expire(silent_for)
    assert table.apply(make_event(incarnation=1, sequence=1), 11.0) is None
    assert alters_list(table.apply(make_event(incarnation=1, sequence=2), 12.0))
    assert (row(table).liveness, row(table).registered_at) == (Liveness.ALIVE, 0.0)
    assert table.expire(16.0) == []


def test_dead_and_left_rows_are_forgotten_later() -> None:
    table = table_of(make_event("dead"), make_event("left"))
    table.apply(make_event("left", status=DOWN), 0.0)
    table.expire(TIMEOUT)
    forgotten = table.expire(TIMEOUT * 5)
    assert [change.forgotten for change in forgotten] == [change.member for change in forgotten]
    assert len(forgotten) == 2
    assert not any(change.alters_list for change in forgotten)
    assert (len(table), table.next_deadline()) == (0, None)


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
    assert alters_list(table.apply(make_event("a", queue_length=1), 1.0))
    table.apply(make_event("b", status=DOWN), 1.0)
    displaced = row(table, "b")
    joined = table.apply(make_event("c"), 1.0)
    assert joined == Change(row(table, "c"), forgotten=displaced)
    assert table.get(ReplicaKey.of(make_event("b"))) is None
    assert row(table, "a").takes_new_work


table_events = st.builds(
    make_event,
    st.sampled_from("bcdefgh"),
    status=st.sampled_from(ReplicaStatus),
    queue_length=st.integers(0, 3),
    incarnation=st.integers(0, 3),
    sequence=st.integers(0, 3),
)
steps = st.lists(st.tuples(table_events | st.none(), st.floats(0, 8)), max_size=60)


@given(steps)
def test_table_stays_consistent_over_any_history(history: list[tuple[ReplicaEvent | None, float]]) -> None:
    table = table_of(max_replicas=4)
    now = 0.0
    for event, pause in history:
        now += pause
        if event is not None:
            try:
                table.apply(event, now)
            except TableFullError:
                assert all(member.liveness in (Liveness.ALIVE, Liveness.LATE) for member in table)
        table.expire(now)
        keys = [ReplicaKey.of(member.event) for member in table]
        assert len(keys) == len(set(keys)) == len(table) <= 4
        deadline = table.next_deadline()
        assert (deadline is None) == (len(table) == 0)
        assert deadline is None or deadline > now
        for member in table:
            silent_too_long = now - member.last_event_at >= TIMEOUT / 2
            assert not (member.takes_new_work and silent_too_long)


@given(steps)
def test_sleeping_until_the_next_deadline_misses_no_change(history: list[tuple[ReplicaEvent | None, float]]) -> None:
    table = table_of()
    now = 0.0
    for event, pause in history:
        deadline = table.next_deadline()
        until = now + pause if deadline is None else min(now + pause, deadline)
        if deadline is None or until < deadline:
            assert table.expire(until) == []
        else:
            assert table.expire(until) != []
        now = until
        if event is not None:
            table.apply(event, now)
