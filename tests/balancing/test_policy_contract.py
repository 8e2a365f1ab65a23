"""The common properties of all built-in policies."""

import random
from collections import Counter
from pickle import dumps

import pytest
from msgspec.structs import replace

from vllm_omni_plugin.balancing import (
    DecidingBalancer,
    LoadBalancingPolicy,
    Prompt,
    ReplicaLoad,
    Task,
    build_load_balancer_factory,
)

from .fakes import with_loads, with_queues

SEEDED = [policy for policy in LoadBalancingPolicy if policy is not LoadBalancingPolicy.ROUND_ROBIN]


def build(policy: LoadBalancingPolicy, seed: int = 0) -> DecidingBalancer:
    options = {} if policy is LoadBalancingPolicy.ROUND_ROBIN else {"rng": random.Random(seed)}
    balancer = type(build_load_balancer_factory(policy)())(**options)
    assert isinstance(balancer, DecidingBalancer)
    return balancer


def full_task() -> Task:
    return {"request_id": "a", "prompt": Prompt(range(100)), "session": "s", "max_tokens": 10}


every_policy = pytest.mark.parametrize("policy", list(LoadBalancingPolicy))


@every_policy
def test_no_replica_is_a_value_error(policy: LoadBalancingPolicy) -> None:
    with pytest.raises(ValueError, match=r"^replicas must not be empty$"):
        build(policy).select({}, [])
    with pytest.raises(ValueError, match=r"^replicas must not be empty$"):
        build(policy).decide(full_task(), ())


@every_policy
@pytest.mark.parametrize("task", [{}, full_task()], ids=["empty task", "full task"])
@pytest.mark.parametrize("total", [1, 2, 65])
def test_a_decision_names_a_replica_that_was_given(policy: LoadBalancingPolicy, task: Task, total: int) -> None:
    replicas = with_loads(*(ReplicaLoad(requests=index % 5, block_size=16) for index in range(total)))
    decision = build(policy).decide(task, replicas)
    assert 0 <= decision.position < total
    assert decision.reason
    if decision.candidates:
        assert decision.position in {candidate.position for candidate in decision.candidates}
        assert len({candidate.position for candidate in decision.candidates}) == len(decision.candidates)


@every_policy
def test_works_with_queue_lengths_only(policy: LoadBalancingPolicy) -> None:
    balancer, replicas = build(policy), with_queues(3, 0, 5)
    decision = balancer.decide(full_task(), replicas)
    for hook in ("assigned", "began", "ended"):
        arguments = {"assigned": (decision,), "began": (None,), "ended": (1.0, 5)}[hook]
        getattr(balancer, hook, lambda *_: None)(full_task(), replicas[decision.position], *arguments)
    assert 0 <= balancer.select({}, replicas) < 3


@pytest.mark.parametrize("policy", sorted({*LoadBalancingPolicy} - {"random", "round-robin"}))
def test_with_queue_lengths_only_the_shortest_queue_wins(policy: LoadBalancingPolicy) -> None:
    for task in ({}, full_task()):
        assert build(policy).select({**task, "session": None}, with_queues(3, 1, 2)) == 1


@pytest.mark.parametrize("policy", SEEDED)
def test_ties_are_broken_uniformly_at_random(policy: LoadBalancingPolicy) -> None:
    balancer, replicas = build(policy, 1), with_loads(*[ReplicaLoad()] * 3)
    picks = Counter(balancer.select({}, replicas) for _ in range(3000))
    # Four standard deviations around 1,000; the seed makes the counts the same in every run.
    assert all(897 <= picks[place] <= 1103 for place in range(3)), picks


@every_policy
def test_a_decision_in_a_large_fleet_compares_few(policy: LoadBalancingPolicy) -> None:
    assert len(build(policy).decide(full_task(), with_loads(*[ReplicaLoad()] * 1000)).candidates) <= 8


@pytest.mark.parametrize("policy", SEEDED)
def test_equal_seeds_give_equal_decisions(policy: LoadBalancingPolicy) -> None:
    replicas = with_loads(*(ReplicaLoad(requests=index % 3) for index in range(100)))
    left, right = build(policy, 7), build(policy, 7)
    assert [left.decide({}, replicas) for _ in range(20)] == [right.decide({}, replicas) for _ in range(20)]


@pytest.mark.parametrize("policy", list(LoadBalancingPolicy))
def test_deciding_changes_no_later_decision_beyond_chance(policy: LoadBalancingPolicy) -> None:
    replicas = with_queues(1, 0, 2)
    balancer = build(policy)
    reasons = {replace(balancer.decide(full_task(), replicas), position=0, candidates=()) for _ in range(20)}
    assert len(reasons) == 1


@every_policy
def test_a_decision_is_plain_data(policy: LoadBalancingPolicy) -> None:
    assert dumps(build(policy).decide(full_task(), with_queues(1, 0)))
