"""Ids of replicas in their stages, over restarts of their processes and of the coordinator."""

import pytest
from coordinator_support import ANY, ManualClock, eventually, make_event
from msgspec.structs import replace

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForStage,
    OmniCoordinator,
    ReplicaEvent,
    ReplicaKey,
    ReplicaStatus,
)
from vllm_omni_plugin.coordinator.state.membership_table import FORGET_AFTER_TIMEOUTS, Liveness, MembershipTable
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds

TIMEOUT = 10.0
DOWN = ReplicaStatus.DOWN


class Fleet:
    """The table and the ids of a coordinator."""

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self.table = MembershipTable(TIMEOUT)
        self.ids = ReplicaIds(first)
        self.now = 0.0

    def announce(self, name: str, host_slot: str = "", replica_id: int = -1, **fields: object) -> None:
        event = replace(make_event(name), host_slot=host_slot, replica_id=replica_id, **fields)
        change = self.table.apply(event, self.now)
        for each in (self.table.end_former(event, self.now), change):
            if each is not None:
                self.ids.record(each)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for change in self.table.expire(self.now):
            self.ids.record(change)

    def present(self) -> list[ReplicaEvent]:
        return [row.event for row in self.table if row.liveness in (Liveness.ALIVE, Liveness.LATE)]

    def listed(self) -> dict[str, int]:
        """The ids of present replicas by name, given in the order of the names."""
        events = sorted(self.present(), key=ReplicaKey.of)
        return {event.input_addr[len("tcp://") : -len(":1")]: self.ids.id_of(event) for event in events}


def test_a_replica_gets_the_lowest_free_id_of_its_stage() -> None:
    fleet = Fleet({0: 2})
    for name in "abc":
        fleet.announce(name)
    fleet.announce("x", stage_id=1)
    assert fleet.listed() == {"a": 2, "b": 3, "c": 4, "x": 0}


def test_a_replica_keeps_its_id_over_any_silence_and_a_restart_on_its_host_slot() -> None:
    fleet = Fleet()
    fleet.announce("a", "n/0")
    fleet.announce("b", "m/0")
    assert fleet.listed() == {"a": 0, "b": 1}
    fleet.pass_time(TIMEOUT / 2)
    fleet.pass_time(TIMEOUT / 2)
    fleet.pass_time(2 * FORGET_AFTER_TIMEOUTS * TIMEOUT)
    assert not list(fleet.table)
    fleet.announce("c", "m/0", incarnation=1)
    fleet.announce("d", "k/0", incarnation=1)
    assert fleet.listed() == {"c": 1, "d": 2}


def test_a_replica_killed_and_started_again_at_once_has_the_id_and_the_other_row_ends() -> None:
    fleet = Fleet()
    fleet.announce("b", "n/0", incarnation=1, sequence=5)
    assert fleet.listed() == {"b": 0}
    fleet.announce("a", "n/0", incarnation=2, sequence=1)
    assert fleet.listed() == {"a": 0}
    # What was still on its way when it was killed.
    fleet.announce("b", "n/0", incarnation=1, sequence=5)
    assert fleet.listed() == {"a": 0}


def test_the_other_row_ends_also_if_the_replica_serves_another_stage_now() -> None:
    fleet = Fleet()
    fleet.announce("b", "n/0", incarnation=1)
    fleet.announce("a", "n/0", incarnation=2, stage_id=1)
    assert fleet.listed() == {"a": 0}


@pytest.mark.parametrize("left", [False, True], ids=["both run", "the newer leaves"])
def test_two_machines_with_one_host_slot_do_not_end_each_other_for_ever(left: bool) -> None:
    fleet = Fleet()
    fleet.announce("a", "localhost/0", incarnation=1, sequence=1)
    assert fleet.listed() == {"a": 0}
    fleet.announce("b", "localhost/0", incarnation=2, sequence=1)
    assert fleet.listed() == {"b": 0}
    fleet.announce("a", "localhost/0", incarnation=1, sequence=2)
    assert fleet.listed() == {"a": 1, "b": 0}
    fleet.announce("b", "localhost/0", incarnation=2, sequence=2, status=DOWN if left else ReplicaStatus.UP)
    fleet.announce("a", "localhost/0", incarnation=1, sequence=3)
    assert fleet.listed() == ({"a": 1} if left else {"a": 1, "b": 0})


def test_a_new_coordinator_takes_over_announced_ids_that_are_free() -> None:
    fleet = Fleet({0: 1})
    for name, replica_id in (("a", 7), ("b", 7), ("c", 0), ("d", -1)):
        fleet.announce(name, replica_id=replica_id)
    assert fleet.listed() == {"a": 7, "b": 1, "c": 2, "d": 3}


def test_a_present_replica_keeps_its_id_whatever_it_announces() -> None:
    fleet = Fleet()
    fleet.announce("a")
    assert fleet.listed() == {"a": 0}
    fleet.announce("a", replica_id=5)
    assert fleet.listed() == {"a": 0}


def test_ids_stay_low_if_each_node_has_a_new_host_slot() -> None:
    fleet = Fleet()
    highest = 0
    for start in range(1000):
        fleet.announce("a", f"pod-{start}/0", incarnation=start + 1)
        highest = max(highest, fleet.listed()["a"])
        fleet.announce("a", f"pod-{start}/0", incarnation=start + 1, sequence=1, status=DOWN)
    assert highest <= 64


def test_a_coordinator_ends_the_row_of_a_killed_replica_when_its_successor_registers(keep: Keep) -> None:
    clock = ManualClock(1000.0)
    coordinator = keep(OmniCoordinator(ANY, ANY, clock=clock, wall_clock=clock.wall))

    def announce(name: str, number: int) -> None:
        addresses = (f"tcp://{name}:1", f"tcp://{name}:2")
        keep(OmniCoordClientForStage(coordinator.router_zmq_addr, *addresses, 0, number=number, host_slot="n/0"))

    def rows() -> list[tuple[str, int]]:
        return [(info.input_addr, info.replica_id) for info in coordinator.get_active_replicas().replicas]

    announce("b", 1)
    eventually(lambda: rows() == [("tcp://b:1", 0)])
    announce("a", 1)
    eventually(lambda: ("tcp://a:1", 0) in rows())
