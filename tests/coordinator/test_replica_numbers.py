"""Replicas keep their numbers and ids over restarts of theirs and of the coordinator."""

import pytest
from coordinator_support import ANY, ManualClock, eventually, make_event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForStage,
    OmniCoordinator,
    ReplicaEvent,
    ReplicaKey,
    ReplicaStatus,
    query_head,
)
from vllm_omni_plugin.coordinator.state.membership_table import Liveness, MembershipTable
from vllm_omni_plugin.coordinator.state.number_book import NumberBook, ReplicaIds, ReplicaNumbers

DOWN = ReplicaStatus.DOWN
SETTLED = 1000.0


class Tables:
    """The table, the numbers and the ids of a coordinator."""

    def __init__(self, reserved: int = 0, first_ids: dict[int, int] | None = None) -> None:
        self.table = MembershipTable(10.0)
        self.numbers = ReplicaNumbers(reserved)
        self.ids = ReplicaIds(first_ids)
        self.now = 0.0

    def announce(self, name: str, host_slot: str = "", number: int = -1, **fields: object) -> list[int]:
        """A replica registers. Returns its number if another one has it."""
        event = replace(make_event(name), host_slot=host_slot, number=number, **fields)
        change = self.table.apply(event, self.now)
        changes = [each for each in (self.table.end_former(event, self.now), change) if each is not None]
        for each in changes:
            self.ids.record(each)
        return [conflict.number for conflict in self.numbers.record(changes)]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        changes = self.table.expire(self.now)
        for change in changes:
            self.ids.record(change)
        self.numbers.record(changes)

    def present(self) -> list[ReplicaEvent]:
        return [row.event for row in self.table if row.liveness in (Liveness.ALIVE, Liveness.LATE)]

    def listed(self) -> dict[str, int]:
        """The ids of present replicas by name, given in the order of the names."""
        events = sorted(self.present(), key=ReplicaKey.of)
        return {event.input_addr[len("tcp://") : -len(":1")]: self.ids.id_of(event) for event in events}


def test_a_number_that_another_replica_has_is_said_once_whatever_becomes_of_the_connection() -> None:
    tables = Tables()
    assert tables.announce("a", "n/0", 0, incarnation=1, sequence=1) == []
    for incarnation, expected in ((1, [0]), (2, []), (3, [])):
        assert tables.announce("b", "m/0", 0, incarnation=incarnation, sequence=1) == expected
        tables.announce("b", "m/0", 0, incarnation=incarnation, sequence=2, status=DOWN)


slots = st.sampled_from(["n/0", "n/1", "m/0", ""])


class Histories(RuleBasedStateMachine):
    """Replicas start, leave, vanish and are started again, and the coordinator is replaced.

    A replica is known by its host slot; one without a slot by its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables(reserved=1)
        self.started = 0
        # By address: host slot, number, incarnation.
        self.running: dict[str, tuple[str, int, int]] = {}
        self.numbers: dict[str, int] = {}
        self.ids: dict[str, int] = {}

    @rule(slot=slots)
    def start(self, slot: str) -> None:
        self.started += 1
        address = f"a{self.started}" if slot else "without a slot"
        number = -1
        if slot:
            (number,) = self.tables.numbers.for_host_slots([slot])
            assert self.numbers.setdefault(slot, number) == number
        self.running = {name: it for name, it in self.running.items() if it[0] != slot}
        self.running[address] = (slot, number, self.started)
        assert not self.announce(address)

    def announce(self, address: str, **fields: object) -> list[int]:
        slot, number, incarnation = self.running[address]
        self.started += 1
        return self.tables.announce(address, slot, number, incarnation=incarnation, sequence=self.started, **fields)

    @rule(slot=slots, politely=st.booleans())
    def end(self, slot: str, politely: bool) -> None:
        for address in [name for name, it in self.running.items() if it[0] == slot]:
            if politely:
                self.announce(address, status=DOWN)
            del self.running[address]

    @rule(seconds=st.sampled_from([1.0, 6.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.tables.pass_time(seconds)
        for address in self.running:
            self.announce(address)

    @rule()
    def replace_coordinator(self) -> None:
        self.tables = Tables(reserved=1)
        running = {slot or address for address, (slot, _, _) in self.running.items()}
        self.numbers, self.ids = (
            {name: number for name, number in known.items() if name in running} for known in (self.numbers, self.ids)
        )
        for address, (slot, _, _) in self.running.items():
            assert not self.announce(address, replica_id=self.ids[slot or address])

    @invariant()
    def each_has_its_id_again(self) -> None:
        listed = self.tables.listed()
        assert len(set(listed.values())) == len(listed)
        for address, (slot, _, _) in self.running.items():
            assert self.ids.setdefault(slot or address, listed[address]) == listed[address]
        assert len(set(self.ids.values())) == len(self.ids)

    @invariant()
    def no_number_is_given_twice_or_is_reserved(self) -> None:
        assert len(set(self.numbers.values()) - {0}) == len(self.numbers)


TestHistories = Histories.TestCase


def test_the_lowest_free_numbers_and_ids_are_given_above_those_of_the_heads_own_engines() -> None:
    tables = Tables(reserved=2, first_ids={0: 2})
    assert tables.numbers.for_host_slots(["n/0", "n/1"]) == (2, 3)
    for name in "abc":
        tables.announce(name)
    tables.announce("x", stage_id=1)
    assert tables.listed() == {"a": 2, "b": 3, "c": 4, "x": 0}
    # From a coordinator whose head had fewer engines of its own, as before an upgrade.
    assert tables.announce("y", "m/0", 1) == [1]
    assert tables.numbers.for_host_slots(["m/0", "m/0"]) == (4, 4)


@pytest.mark.parametrize("stage_id", [0, 1])
def test_a_replica_killed_and_started_again_at_once_ends_the_other_row_of_its_host_slot(stage_id: int) -> None:
    tables = Tables()
    tables.announce("b", "n/0", incarnation=1, sequence=5)
    assert tables.listed() == {"b": 0}
    tables.announce("a", "n/0", incarnation=2, sequence=1, stage_id=stage_id)
    # What was still on its way when it was killed.
    tables.announce("b", "n/0", incarnation=1, sequence=5)
    assert tables.listed() == {"a": 0}


@pytest.mark.parametrize("left", [False, True], ids=["both run", "the newer leaves"])
def test_two_machines_with_one_host_slot_do_not_end_each_other_for_ever(left: bool) -> None:
    tables = Tables()
    tables.announce("a", "localhost/0", 3, incarnation=1, sequence=1)
    assert tables.listed() == {"a": 0}
    tables.announce("b", "localhost/0", 3, incarnation=2, sequence=1)
    assert tables.listed() == {"b": 0}
    assert tables.announce("a", "localhost/0", 3, incarnation=1, sequence=2) == [3]
    assert tables.listed() == {"a": 1, "b": 0}
    tables.announce("b", "localhost/0", 3, incarnation=2, sequence=2, status=DOWN if left else ReplicaStatus.UP)
    tables.announce("a", "localhost/0", 3, incarnation=1, sequence=3)
    assert tables.listed() == ({"a": 1} if left else {"a": 1, "b": 0})


def test_the_second_replica_with_a_number_is_reported_once_and_gets_its_own_at_its_next_start() -> None:
    tables = Tables()
    tables.announce("a", "n/0", 5)
    assert tables.announce("b", "m/0", 5) == [5]
    assert not tables.announce("b", "m/0", 5)
    assert tables.numbers.for_host_slots(["n/0", "m/0"]) == (5, 0)


def test_a_replica_keeps_the_number_that_its_engine_runs_with_over_one_that_was_only_remembered() -> None:
    tables = Tables()
    assert tables.numbers.for_host_slots(["n/0"]) == (0,)
    assert not tables.announce("a", "m/0", 0)
    assert tables.numbers.for_host_slots(["n/0"]) == (1,)


def test_a_replica_that_returns_has_its_former_id_though_few_were_ever_there_at_once() -> None:
    tables = Tables()
    for replica_id, name in enumerate("abc"):
        tables.announce(name, f"{name}/0")
        assert tables.listed() == {name: replica_id}
        tables.announce(name, f"{name}/0", sequence=1, status=DOWN)
    for replica_id, name in enumerate("abc"):
        tables.announce(name, f"{name}/0", incarnation=2)
        assert tables.listed()[name] == replica_id


def test_endless_host_slots_are_forgotten_and_their_numbers_given_again() -> None:
    book = NumberBook({}, least_remembered=4)
    assert max(book.prepare(0, f"n/{slot}") for slot in range(100)) == 4
    tables = Tables()
    for start in range(1000):
        tables.announce("a", f"pod-{start}/0", start, incarnation=start + 1)
        assert tables.listed()["a"] <= 64
        tables.announce("a", f"pod-{start}/0", start, incarnation=start + 1, sequence=1, status=DOWN)
    assert max(tables.numbers.for_host_slots([f"k/{slot}" for slot in range(5000)])) < 2 * 1024 + 2


def test_a_coordinator_gives_numbers_once_it_has_learned_those_of_running_replicas_and_ends_former_rows(
    keep: Keep,
) -> None:
    clock = ManualClock(SETTLED - 1.0)
    coordinator = keep(
        OmniCoordinator(ANY, ANY, settle_time=1.0, reserved_numbers=1, clock=clock, wall_clock=clock.wall)
    )
    address = coordinator.router_zmq_addr

    def announce(name: str) -> None:
        keep(OmniCoordClientForStage(address, f"tcp://{name}:1", f"tcp://{name}:2", 0, number=1, host_slot="n/0"))
        eventually(
            lambda: (
                [(info.input_addr, info.replica_id) for info in coordinator.get_active_replicas().replicas]
                == [(f"tcp://{name}:1", 0)]
            )
        )

    announce("b")
    announce("a")
    early = query_head(address, 0, None, host_slots=["n/0", "m/0"]).info
    assert early is not None
    assert early.numbers == ()
    clock.now = SETTLED
    info = query_head(address, 0, None, host_slots=["n/0", "m/0"]).info
    assert info is not None
    assert info.numbers == (1, 2)


def test_a_query_with_many_new_host_slots_does_not_look_at_all_numbers_for_each() -> None:
    steps = 0

    class Number(int):
        def __add__(self, other: int) -> "Number":
            nonlocal steps
            steps += 1
            return Number(int(self) + other)

    book = NumberBook({0: Number(2)}, 1024)
    for node in range(4):
        numbers = [book.prepare(0, f"n{node}/{slot}") for slot in range(1024)]
        assert len(set(numbers)) == 1024
        assert min(numbers) == 2
    assert 1024 <= steps < 2 * 4 * 1024
