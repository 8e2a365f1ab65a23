"""The index of queue lengths, against a linear search."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.loads.replica_load import ReplicaLoad
from vllm_omni_plugin.balancing.loads.serving_replicas import ServingReplicas

from .pool import pool_of


@dataclass
class Changing:
    """A `ReplicaView` whose queue changes; equal to others with the same fields."""

    queue_length: int
    input_addr: str = "in"
    output_addr: str = "out"
    stage_id: int = 0


def serving(*queue_lengths: int) -> ServingReplicas[Changing]:
    return ServingReplicas([Changing(length) for length in queue_lengths])


def change(replicas: ServingReplicas[Changing], place: int, length: int) -> None:
    replicas[place].queue_length = length
    replicas.update(replicas[place], ReplicaLoad(length))


LENGTHS = st.one_of(st.integers(0, 5), st.integers(0, 10**6))


@given(
    st.lists(LENGTHS, min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 29), LENGTHS, st.booleans()), max_size=100),
    st.integers(),
)
def test_the_index_gives_the_result_of_a_search(
    lengths: list[int], steps: list[tuple[int, int, bool]], seed: int
) -> None:
    replicas, rng = serving(*lengths), random.Random(seed)
    for place, length, ask in steps:
        change(replicas, place % len(lengths), length)
        # Without a query the index does not exist yet, or is several changes old.
        if ask:
            now = [replica.queue_length for replica in replicas]
            assert now[replicas.shortest(rng)] == min(now)
            assert replicas.total_queue_length == sum(now)


@given(st.lists(st.integers(0, 3), min_size=9, max_size=40), st.integers())
def test_the_policy_picks_a_shortest_queue_from_the_index_as_from_a_list(lengths: list[int], seed: int) -> None:
    replicas, balancer = serving(*lengths), LeastQueueLengthBalancer(random.Random(seed))
    for view in (replicas, list(replicas)):
        decision = balancer.decide({}, view)
        assert lengths[decision.position] == min(lengths)
        assert [(c.position, c.score) for c in decision.candidates] == [(decision.position, min(lengths))]


@pytest.mark.parametrize("size", [4, 40], ids=["searched", "indexed"])
def test_ties_are_broken_uniformly_after_changes(size: int) -> None:
    replicas, balancer = serving(*[1] * size), LeastQueueLengthBalancer(random.Random(1))
    balancer.decide({}, replicas)
    change(replicas, 0, 2)
    change(replicas, 3, 0)
    change(replicas, 3, 1)
    picks = Counter(balancer.select({}, replicas) for _ in range(1000 * (size - 1)))
    assert picks.keys() == set(range(1, size))
    assert all(850 <= count <= 1150 for count in picks.values()), picks


def test_the_work_is_up_to_date_after_changes() -> None:
    replicas = ServingReplicas(pool_of(None, 2).replicas)
    replicas[0].charge(2, prefill_tokens=70)
    assert [list(each) for each in replicas.work] == [[2, 0], [70, 0]]
    replicas[1].charge(1, prefill_tokens=9)
    replicas.update(replicas[1], replicas[1].load._replace(decode_tokens=100, kv_usage=0.5))
    assert [list(each) for each in replicas.work] == [[2, 1], [70, 9 + 1 + 1500]]
