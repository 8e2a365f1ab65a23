"""Each replica has a number that no other has, in all its restarts and those of the coordinator."""

from coordinator_support import ANY, ManualClock, eventually, make_event
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForStage,
    OmniCoordinator,
    ReplicaEvent,
    ReplicaStatus,
    query_head,
)
from vllm_omni_plugin.coordinator.state.membership_table import MembershipTable
from vllm_omni_plugin.coordinator.state.number_book import NumberBook, ReplicaNumbers

SETTLED = 1000.0


class Fleet:
    """The table and the numbers of a coordinator, and the replicas that announce themselves to it."""

    def __init__(self, reserved: int = 0) -> None:
        self.table = MembershipTable(10.0)
        self.numbers = ReplicaNumbers(reserved)
        self.now = 0.0
        self._numbers = iter(range(1, 10_000))

    def start(self, host_slot: str, address: str) -> int:
        """Start a replica as a node does: it asks for its number first. Returns the number."""
        (number,) = self.numbers.for_host_slots([host_slot])
        assert not self.announce(address, host_slot, number)
        return number

    def announce(self, address: str, host_slot: str, number: int, incarnation: int | None = None) -> list[ReplicaEvent]:
        """A replica registers. Returns it if another one has its number."""
        sequence = next(self._numbers)
        event = make_event(address, incarnation=incarnation or sequence, sequence=sequence)
        return self._apply(replace(event, host_slot=host_slot, number=number))

    def stop(self, address: str) -> None:
        self._apply(make_event(address, status=ReplicaStatus.DOWN, incarnation=next(self._numbers)))

    def _apply(self, event: ReplicaEvent) -> list[ReplicaEvent]:
        change = self.table.apply(event, self.now)
        former = self.table.end_former(event, self.now)
        return self.numbers.record([each for each in (former, change) if each is not None])

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.numbers.record(self.table.expire(self.now))


def test_numbers_begin_after_the_engines_of_the_first_head() -> None:
    assert ReplicaNumbers(2).for_host_slots(["n/0", "n/1", "m/0"]) == (2, 3, 4)


def test_a_replica_of_the_same_host_slot_gets_its_number_again_whatever_its_address() -> None:
    fleet = Fleet()
    assert [fleet.start("n/0", "a"), fleet.start("m/0", "b")] == [0, 1]
    fleet.stop("a")
    assert fleet.start("k/0", "c") == 2
    assert fleet.start("n/0", "d") == 0
    fleet.pass_time(20.0)
    fleet.pass_time(1000.0)
    assert fleet.start("m/0", "e") == 1


def test_a_new_coordinator_gives_nobody_the_number_that_a_replica_announces() -> None:
    fleet = Fleet()
    fleet.announce("a", "n/0", 1)
    fleet.announce("b", "m/0", 30_000)
    assert fleet.numbers.for_host_slots(["k/0", "k/1", "m/0", "n/0"]) == (0, 2, 30_000, 1)


def test_a_replica_keeps_the_number_that_its_engine_runs_with_over_one_that_was_only_remembered() -> None:
    fleet = Fleet()
    assert fleet.numbers.for_host_slots(["n/0"]) == (0,)
    assert not fleet.announce("a", "m/0", 0)
    assert fleet.start("n/0", "b") == 1


def test_the_second_replica_with_a_number_is_reported_once_and_gets_its_own_at_its_next_start() -> None:
    fleet = Fleet()
    fleet.announce("a", "n/0", 5)
    assert [event.number for event in fleet.announce("b", "m/0", 5)] == [5]
    assert not fleet.announce("b", "m/0", 5)
    assert fleet.numbers.for_host_slots(["n/0", "m/0"]) == (5, 0)


def test_a_replica_killed_and_started_again_in_its_host_slot_does_not_conflict_with_its_old_row() -> None:
    fleet = Fleet()
    fleet.announce("a", "n/0", 5)
    assert not fleet.announce("b", "n/0", 5)
    assert not fleet.announce("c", "n/0", 5)


def test_two_machines_that_have_the_same_name_get_numbers_of_their_own() -> None:
    fleet = Fleet()
    fleet.announce("a", "localhost/0", 3, incarnation=1)
    fleet.announce("b", "localhost/0", 3, incarnation=2)
    assert fleet.announce("a", "localhost/0", 3, incarnation=1)
    assert fleet.numbers.for_host_slots(["k/0"]) == (1,)


def test_a_number_of_the_first_heads_engines_is_not_given_again() -> None:
    fleet = Fleet(reserved=2)
    fleet.announce("a", "n/0", 1)
    assert fleet.numbers.for_host_slots(["n/0", "n/0"]) == (2, 2)


def test_endless_host_slots_are_forgotten_and_their_numbers_given_again() -> None:
    book = NumberBook({}, least_remembered=4)
    numbers = [book.prepare(0, f"n/{slot}") for slot in range(100)]
    assert max(numbers) == 4
    fleet = Fleet()
    fleet.announce("a", "n/0", 7)
    for slot in range(5000):
        fleet.announce("a", f"m/{slot}", slot)
    assert max(fleet.numbers.for_host_slots([f"k/{slot}" for slot in range(5000)])) < 2 * 1024 + 2


@given(st.lists(st.tuples(st.sampled_from(["ask", "start", "stop", "age"]), st.integers(0, 5), st.integers(0, 8))))
def test_present_replicas_never_share_a_number_that_was_given(steps: list[tuple[str, int, int]]) -> None:
    fleet = Fleet(reserved=1)
    for step, place, number in steps:
        address, host_slot = f"a{place}", f"n/{number % 3}"
        match step:
            case "ask":
                (given,) = fleet.numbers.for_host_slots([host_slot])
                assert given >= 1
            case "start":
                fleet.announce(address, host_slot, number)
            case "stop":
                fleet.stop(address)
            case "age":
                fleet.pass_time(float(number))
        slots = ["x/0", "x/1", "n/0", "n/1", "n/2"]
        numbers = fleet.numbers.for_host_slots(slots)
        assert len(set(numbers)) == len(slots)


def test_a_node_gets_numbers_from_the_coordinator_once_that_has_learned_those_of_running_replicas(
    keep: Keep,
) -> None:
    clock = ManualClock(SETTLED - 1.0)
    coordinator = keep(
        OmniCoordinator(ANY, ANY, settle_time=1.0, reserved_numbers=1, clock=clock, wall_clock=clock.wall)
    )
    address = coordinator.router_zmq_addr
    keep(OmniCoordClientForStage(address, "tcp://a:1", "tcp://a:2", 0, number=1, host_slot="n/0"))
    eventually(lambda: coordinator.get_active_replicas().replicas)
    early = query_head(address, 0, None, host_slots=["n/0", "m/0"]).info
    assert early is not None
    assert early.numbers == ()
    clock.now = SETTLED
    info = query_head(address, 0, None, host_slots=["n/0", "m/0"]).info
    assert info is not None
    assert info.numbers == (1, 2)
