"""Random histories of heads and replicas: in the end each head knows what the others have charged."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator.work_bus import WorkBus, WorkingHead
from vllm_omni_plugin.orchestrator import PoolMember
from vllm_omni_plugin.orchestrator.requests.load_ledger import NO_WORK, Work

REPLICAS = 3
HEADS = ("a", "b", "c")

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "leave", "cut off", "attach", "lose", "charge", "charge", "begin", "release", "deliver", "advance"]
        ),
        st.sampled_from(HEADS),
        st.integers(0, 5),
    ),
    max_size=60,
)


def member_of(head: WorkingHead, replica: int) -> PoolMember | None:
    found = [member for member in head.pool.serving if member.replica_id == replica]
    return found[0] if found else None


def step(bus: WorkBus, incarnations: list[int], action: str, head_id: str, number: int) -> None:
    head, replica = bus.heads.get(head_id), number % REPLICAS
    if head is None:
        if action == "join":
            bus.join(head_id)
        return
    member = member_of(head, replica)
    run = head.runs[number % len(head.runs)] if head.runs else None
    match action:
        case "leave":
            bus.leave(head_id)
        case "cut off":
            bus.cut_off(head_id, noticed=number % 2 == 0)
        case "attach" if member is None:
            head.attach(replica, incarnations[replica])
        case "lose" if member is not None:
            # Often the replica has restarted by then, which other heads may not have noticed.
            incarnations[replica] += number % 2
            head.lose(member)
        case "charge" if member is not None:
            head.charge(member, "xyz"[number // 2])
        case "begin" if run is not None and not run.has_output:
            head.begin(run)
        case "release" if run is not None:
            head.release(run)
        case "deliver":
            bus.deliver(head_id, number)
        case "advance":
            bus.timers.advance(number / 100)


def own(head: WorkingHead, like: PoolMember) -> Work:
    for member in head.pool.serving:
        if (member.replica_id, member.incarnation) == (like.replica_id, like.incarnation):
            return member.ledger.own
    return NO_WORK


@given(STEPS)
def test_in_the_end_each_head_knows_the_whole_load(steps: list[tuple[str, str, int]]) -> None:
    bus, incarnations = WorkBus(), [0] * REPLICAS
    for action, head_id, number in steps:
        step(bus, incarnations, action, head_id, number)
    bus.settle()
    for head in bus.heads.values():
        others = [other for other in bus.heads.values() if other is not head]
        for member in head.pool.serving:
            theirs = [own(other, member) for other in others]
            load, mine = member.load, member.ledger.own
            assert load.heads_report is bool(others)
            assert load.others == sum(work.requests for work in theirs)
            assert load.requests == mine.requests + load.others
            in_use = Counter([run.adapter for run in member.in_flight.values()])
            in_use.update({name for work in theirs for name in work.adapters})
            assert load.adapters.in_use == in_use
            assert load.prefill_tokens == mine.prefill_tokens + sum(work.prefill_tokens for work in theirs)
        assert head.pool.serving.unreported.heads == len(bus.heads)


@given(STEPS)
def test_no_head_reports_more_than_once_in_an_interval(steps: list[tuple[str, str, int]]) -> None:
    bus, incarnations = WorkBus(), [0] * REPLICAS
    for action, head_id, number in steps:
        # A head of the same name that comes after another is another.
        if action != "leave":
            step(bus, incarnations, action, head_id, number)
    bus.settle()
    for head_id in HEADS:
        times = [time for name, time, _, _ in bus.reports if name == head_id]
        assert all(later - earlier >= 0.0399 for earlier, later in pairwise(times))
