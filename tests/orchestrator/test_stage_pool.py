"""The replicas of one stage, and the choice among them."""

import itertools
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_api import FakeEngineApi, FakeRequest
from tests.fakes.links import FakeLink
from vllm_omni_plugin.balancing import Decision, LeastQueueLengthBalancer, LoadBalancer, PrefixBalancer, Prompt, Task
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator import PoolMember, StagePool, StageRun
from vllm_omni_plugin.orchestrator.requests.load_ledger import UNKNOWN_SIZE
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, LoadReport


def serve(pool: StagePool, member: PoolMember, size: EngineSize = UNKNOWN_SIZE) -> None:
    link = FakeLink(str(member.replica_id))
    client = EngineClient(link, FakeEngineApi(), member.replica_id, lambda outputs: None, lambda reason: None)
    pool.serve(member, client, link.input_addr, link.output_addr, size)


def make_pool(size: int, balancer: LoadBalancer | None = None) -> tuple[StagePool, list[PoolMember]]:
    pool = StagePool(2, balancer or LeastQueueLengthBalancer())
    members = [pool.add(replica_id) for replica_id in range(size)]
    for member in members:
        serve(pool, member)
    return pool, members


def pick(pool: StagePool, task: Task, affinity_key: int | None = None) -> PoolMember:
    return pool.decide(task, affinity_key)[0]


def charge(pool: StagePool, member: PoolMember, name: str, adapter: str = "") -> StageRun:
    state = StageRun(name, FakeRequest(name), 0.0)
    state.assign(member.replica_id, f"{name}-1", {"prompt": Prompt((), adapter)}, Decision(0, "test"), 0.0)
    pool.charge(member, state)
    return state


def test_a_second_replica_of_one_id_gets_the_lowest_free_one() -> None:
    pool, _ = make_pool(1)
    assert pool.add(0).replica_id == 1


def test_loads_of_adapters_are_counted_and_a_replica_that_returns_goes_on_counting() -> None:
    pool = StagePool(2, LeastQueueLengthBalancer())
    member = pool.add(0)
    serve(pool, member, EngineSize(adapters=2))
    for names, loads in (("aab", 2), ("ab", 2), ("ca", 4)):
        for name in names:
            pool.release(charge(pool, member, "r", name))
        assert member.adapter_loads == loads
    pool.lose(member, ReplicaStatus.DOWN)
    pool.remove(member)
    assert pool.add(0).counts == (7, 0, 0, 4)


def test_a_tuple_that_was_read_before_a_change_stays_as_it_was() -> None:
    pool, members = make_pool(2)
    serving = pool.serving
    pool.lose(members[0], ReplicaStatus.DOWN)
    assert serving == tuple(members)


def test_a_report_of_full_kv_memory_counts_at_the_next_choice() -> None:
    pool, members = make_pool(2, PrefixBalancer(rng=Random(0)))
    runs = [charge(pool, member, f"r{number}") for member in members for number in range(member.replica_id + 1)]
    assert pick(pool, {}) is members[0]
    members[0].ledger.mark_sent(runs[0])
    # It counts the same requests as the head.
    pool.report(members[0], LoadReport(waiting=0, running=1, kv_usage=0.98))
    assert pick(pool, {}) is members[1]
    pool.release(runs[0])
    assert pick(pool, {}) is members[0]


def test_an_affinity_key_whose_replica_is_lost_goes_to_one_that_serves() -> None:
    pool, members = make_pool(3)
    home = pick(pool, {}, affinity_key=4)
    pool.lose(home, ReplicaStatus.DOWN)
    assert pick(pool, {}, affinity_key=4) in set(members) - {home}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], "No replica of stage 2 can serve right now (it has none). Please try again later."),
        ([ReplicaStatus.DOWN, ReplicaStatus.ERROR], "(replica 0 is down, replica 1 is error)"),
        (
            [ReplicaStatus.ERROR] * 3 + [ReplicaStatus.DOWN] * 9 + [ReplicaStatus.DRAINING] * 2,
            "(of its replicas 9 are down, 2 get no new requests, 3 are error)",
        ),
    ],
)
def test_an_error_names_the_states_of_replicas_that_cannot_serve(statuses: list[ReplicaStatus], expected: str) -> None:
    pool, members = make_pool(len(statuses))
    for member, status in zip(members, statuses, strict=True):
        pool.lose(member, status)
    for affinity_key in (None, 1):
        with pytest.raises(NoReplicaError, match=re.escape(expected)):
            pick(pool, {}, affinity_key=affinity_key)


@given(st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=60), st.randoms(use_true_random=False))
def test_ids_are_given_lowest_first_and_members_stay_in_order_through_any_history(
    steps: list[int | None], random: Random
) -> None:
    pool, there, gone = make_pool(0)[0], dict[int, PoolMember](), list[PoolMember]()
    for named in steps:
        if there and random.random() < 0.4:
            gone.append(there.pop(random.choice(sorted(there))))
            for member in gone:
                pool.remove(member)
        elif named is None:
            lowest = next(free for free in itertools.count() if free not in there)
            there[lowest] = pool.add()
            assert there[lowest].replica_id == lowest
        elif named not in there:
            there[named] = pool.add(named)
        assert [member.replica_id for member in pool.members] == sorted(there)


def test_a_replica_that_serves_cannot_be_removed_and_is_lost_once() -> None:
    pool, (member,) = make_pool(1)
    run = charge(pool, member, "a")
    with pytest.raises(AssertionError):
        pool.remove(member)
    assert [pool.lose(member, ReplicaStatus.DOWN) for _ in range(2)] == [[run], []]
    pool.remove(member)
    assert pool.members == ()


def test_a_replica_cordoned_for_two_reasons_serves_after_both_are_gone() -> None:
    pool, (first, second) = make_pool(2)
    charge(pool, first, "a")
    pool.cordon(first, "admin")
    pool.cordon(first, "suspect")
    assert (first.status, pool.serving, first.queue_length) == (ReplicaStatus.DRAINING, (second,), 1)
    pool.uncordon(first, "admin")
    pool.uncordon(first, "never placed")
    assert (pool.serving, first.cordons) == ((second,), {"suspect"})
    pool.uncordon(first, "suspect")
    assert pool.serving == (first, second)


def test_a_hold_outlives_the_loss_of_its_replica() -> None:
    pool, (member,) = make_pool(1)
    pool.cordon(member, "admin")
    pool.lose(member, ReplicaStatus.DOWN)
    assert member.status is ReplicaStatus.DOWN
    pool.uncordon(member, "suspect")
    assert member.status is ReplicaStatus.DOWN
    serve(pool, member)
    assert (member.status, pool.serving) == (ReplicaStatus.DRAINING, ())


async def test_waiters_for_idleness_are_notified_once_nothing_is_in_flight() -> None:
    pool, (member, other) = make_pool(2)
    assert pool.when_idle(other).done()
    states = [charge(pool, member, name) for name in "ab"]
    idle = pool.when_idle(member)
    pool.release(states[0])
    assert not idle.done()
    pool.release(states[1])
    assert idle.done()
    charge(pool, member, "c")
    idle = pool.when_idle(member)
    assert not idle.done()
    pool.lose(member, ReplicaStatus.DOWN)
    assert idle.done()


async def test_a_cancelled_wait_for_idleness_harms_nobody() -> None:
    pool, (member,) = make_pool(1)
    state = charge(pool, member, "a")
    pool.when_idle(member).cancel()
    second = pool.when_idle(member)
    pool.release(state)
    assert second.done()
    assert not second.cancelled()
