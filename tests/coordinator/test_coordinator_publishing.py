"""When lists go out: pure schedule, and what a head is shown."""

from coordinator_support import make_event

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.state.list_deltas import PublishSchedule, replica_list
from vllm_omni_plugin.coordinator.state.membership_table import Liveness, Member
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds


def test_under_any_load_at_most_ten_lists_go_out_per_second() -> None:
    schedule = PublishSchedule(0.0, quiet_until=0.0)
    published = 0
    for step in range(100_000):
        now = step / 10_000
        schedule.request(now)
        if now >= schedule.due_at:
            schedule.published(now)
            published += 1
    assert 90 <= published <= 100


def test_without_changes_the_keep_alive_is_due_every_five_seconds() -> None:
    schedule = PublishSchedule(0.0, quiet_until=0.0)
    schedule.published(3.0)
    assert schedule.due_at == 8.0


def test_list_shows_times_by_the_wall_clock() -> None:
    member = Member(make_event(queue_length=4), Liveness.ALIVE, registered_at=10.0, last_event_at=40.0, changed_at=10.0)
    shown = replica_list([member], ReplicaIds(), now=50.0, wall_now=1_000_050.0)
    assert shown.timestamp == 1_000_050.0
    (info,) = shown.replicas
    assert (info.registered_at, info.last_heartbeat, info.queue_length) == (1_000_010.0, 1_000_040.0, 4)


def test_list_has_a_stable_order() -> None:
    def shown(*order: str) -> list[str]:
        members = [Member(make_event(name), Liveness.ALIVE, 0.0, 0.0, 0.0) for name in order]
        return [info.input_addr for info in replica_list(members, ReplicaIds(), 0.0, 0.0).replicas]

    assert shown("c", "a", "b") == shown("b", "c", "a") == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]


def test_list_shows_only_replicas_that_may_work() -> None:
    def member(name: str, status: ReplicaStatus, liveness: Liveness) -> Member:
        return Member(make_event(name, status=status), liveness, 0.0, 0.0, 0.0)

    shown = replica_list(
        [
            member("up", ReplicaStatus.UP, Liveness.ALIVE),
            member("late", ReplicaStatus.UP, Liveness.LATE),
            member("draining", ReplicaStatus.DRAINING, Liveness.ALIVE),
            member("error", ReplicaStatus.ERROR, Liveness.ALIVE),
            member("dead", ReplicaStatus.UP, Liveness.DEAD),
            member("left", ReplicaStatus.DOWN, Liveness.LEFT),
        ],
        ReplicaIds(),
        0.0,
        0.0,
    )
    assert [info.input_addr for info in shown.replicas] == ["tcp://up:1"]
    assert [info.input_addr for info in shown.no_new_work] == ["tcp://draining:1", "tcp://late:1"]
