"""The policy `prefix`: hand-computed choices, reasons and fallbacks, and what it learns."""

import random
from collections import Counter
from typing import Any

import pytest

from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.balancing.decision import Candidate, Decision
from vllm_omni_plugin.balancing.prefix import PrefixBalancer
from vllm_omni_plugin.balancing.prompt import Prompt
from vllm_omni_plugin.balancing.serving import ServingReplicas
from vllm_omni_plugin.errors import ConfigError

from .fakes import with_queues
from .pool import Pool, PooledReplica, pool_of, prompt_task

PROMPT = list(range(1000))
"""62 full blocks of 16, that is 992 tokens, and 8 more tokens."""


def policy(**options: Any) -> PrefixBalancer:
    return PrefixBalancer(rng=random.Random(0), **options)


def with_prompt_at(position: int, *loads: ReplicaLoad) -> Pool:
    """A pool in which one replica has PROMPT cached, and all have these loads."""
    pool = Pool(policy(), tuple(PooledReplica(number, load) for number, load in enumerate(loads)))
    pool.policy.dispatched(prompt_task(PROMPT), pool.replicas[position], Decision(position, "test"))
    return pool


@pytest.mark.parametrize(
    ("loads", "scores", "chosen", "reason"),
    [
        pytest.param([ReplicaLoad(), ReplicaLoad()], [8, 1000], 0, "prefix", id="idle"),
        pytest.param([ReplicaLoad(requests=7), ReplicaLoad()], [928, 1000], 0, "prefix", id="worth-the-wait"),
        pytest.param([ReplicaLoad(requests=8), ReplicaLoad()], [1056, 1000], 1, "prefix-spilled", id="too-busy"),
        pytest.param(
            [ReplicaLoad(requests=1, prefill_tokens=900), ReplicaLoad()],
            [1044, 1000],
            1,
            "prefix-spilled",
            id="prefill",
        ),
        pytest.param(
            [ReplicaLoad(requests=1, prefill_tokens=800), ReplicaLoad()], [944, 1000], 0, "prefix", id="less-prefill"
        ),
        pytest.param([ReplicaLoad(requests=30), ReplicaLoad(requests=9)], [3872, 5152], 0, "prefix", id="all-busy"),
    ],
)
def test_the_least_added_latency_wins(loads: list[ReplicaLoad], scores: list[float], chosen: int, reason: str) -> None:
    pool = with_prompt_at(0, *loads)
    decision = pool.policy.decide(prompt_task(PROMPT), pool.replicas)
    assert decision == Decision(
        chosen, reason, (Candidate(0, scores[0], 992), Candidate(1, scores[1])), "", 992 if chosen == 0 else 0
    )


def test_the_price_of_answers_is_an_option() -> None:
    pool = pool_of(policy(answer_tokens=0), 1, requests=1, prefill_tokens=50)
    assert pool.policy.decide(prompt_task(PROMPT), pool.replicas).candidates == (Candidate(0, 2050.0),)


@pytest.mark.parametrize("value", [-1, "many", float("nan")])
def test_an_option_out_of_range_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="answer_tokens"):
        PrefixBalancer(answer_tokens=value)


def test_equal_scores_go_to_the_longest_match() -> None:
    pool = pool_of(policy(), 3)
    pool.policy.dispatched(prompt_task(PROMPT), pool.replicas[1], Decision(1, "test"))
    pool.replicas[1].charge(0, 992)
    decisions = [pool.policy.decide(prompt_task(PROMPT), pool.replicas) for _ in range(20)]
    assert {candidate.score for candidate in decisions[0].candidates} == {1000}
    assert {decision.position for decision in decisions} == {1}


def test_equal_replicas_without_a_match_are_chosen_alike() -> None:
    pool = pool_of(policy(), 4)
    chosen = Counter(pool.policy.select(prompt_task(PROMPT), pool.replicas) for _ in range(400))
    assert min(chosen[position] for position in range(4)) > 60


def test_deciding_teaches_nothing() -> None:
    pool = pool_of(policy(), 2)
    for _ in range(3):
        assert pool.policy.decide(prompt_task(PROMPT), pool.replicas).reason == "least-load"


def test_a_request_that_went_elsewhere_is_cached_there() -> None:
    pool = pool_of(policy(), 2)
    decision = pool.policy.decide(prompt_task(PROMPT), pool.replicas)
    bound = 1 - decision.position
    pool.policy.dispatched(prompt_task(PROMPT), pool.replicas[bound], decision)
    assert pool.policy.select(prompt_task(PROMPT), pool.replicas) == bound


def test_the_answer_is_cached_for_the_next_turn() -> None:
    pool, task = pool_of(policy(), 2), prompt_task(PROMPT)
    first = pool.send(task, finish=True)
    answer = list(range(5000, 5100))
    pool.policy.ended(task | {"answer_ids": answer}, pool.replicas[first.position], 1.0, 100)
    second = pool.policy.decide(prompt_task([*PROMPT, *answer, *range(7000, 7050)]), pool.replicas)
    # 1,099 tokens were computed, in 68 full blocks.
    assert (second.position, second.matched_tokens) == (first.position, 68 * 16)


def test_an_attempt_that_ended_without_an_answer_is_no_news() -> None:
    pool, task = pool_of(policy(), 2), prompt_task(PROMPT)
    first = pool.send(task, finish=True)
    pool.policy.ended(task, pool.replicas[first.position], 1.0, 0)
    pool.policy.ended({}, pool.replicas[first.position], 1.0, 0)
    assert pool.policy.decide(task, pool.replicas).matched_tokens == 992


def test_a_lost_replica_has_nothing_when_it_comes_back() -> None:
    pool, task = pool_of(policy(), 2), prompt_task(PROMPT)
    lost = pool.replicas[pool.send(task, finish=True).position]
    pool.policy.forgotten(lost)
    pool.policy.forgotten(lost)
    assert pool.policy.decide(task, pool.replicas).matched_tokens == 0


def test_a_replica_whose_cache_was_cleared_has_nothing() -> None:
    pool, task = pool_of(policy(), 2), prompt_task(PROMPT)
    holder = pool.replicas[pool.send(task, finish=True).position]
    pool.policy.cleared(holder)
    assert pool.policy.decide(task, pool.replicas).matched_tokens == 0


def test_a_replica_that_takes_no_new_work_is_not_chosen_for_its_cache() -> None:
    pool, task = pool_of(policy(), 20), prompt_task(PROMPT)
    holder = pool.send(task, finish=True).position
    others = tuple(replica for position, replica in enumerate(pool.replicas) if position != holder)
    assert pool.policy.decide(task, others).matched_tokens == 0
    assert pool.policy.decide(task, pool.replicas).position == holder


@pytest.mark.parametrize(
    ("task", "fallback"),
    [
        pytest.param({}, "no-prompt", id="no-prompt"),
        pytest.param(prompt_task(PROMPT, cacheable=False), "uncacheable", id="uncacheable"),
        pytest.param(prompt_task([]), "", id="empty-prompt"),
        pytest.param(prompt_task([1, 2, 3]), "", id="less-than-a-block"),
    ],
)
def test_without_blocks_load_decides(task: Any, fallback: str) -> None:
    pool = pool_of(policy(), 3)
    pool.replicas[0].charge(1)
    pool.replicas[2].charge(2)
    decision = pool.send(task)
    assert (decision.position, decision.reason) == (1, "least-load")
    assert pool.policy.decide(task, pool.replicas).fallback == fallback


def test_replicas_that_say_nothing_but_their_queue_length_are_balanced() -> None:
    replicas = with_queues(2, 1, 3)
    decision = policy().decide(prompt_task(PROMPT), replicas)
    assert (decision.position, decision.reason) == (1, "least-load")


def test_no_replica_is_an_error() -> None:
    with pytest.raises(ValueError, match="replicas must not be empty"):
        policy().select({}, [])


def test_block_sizes_may_differ() -> None:
    pool = Pool(policy(), tuple(PooledReplica(n, ReplicaLoad(block_size=16 << n)) for n in range(3)))
    for position, replica in enumerate(pool.replicas):
        pool.policy.dispatched(prompt_task(PROMPT), replica, Decision(position, "test"))
    decision = pool.policy.decide(prompt_task(PROMPT), pool.replicas)
    assert [candidate.matched_tokens for candidate in decision.candidates] == [992, 992, 960]


@pytest.mark.parametrize("replicas", [tuple, ServingReplicas])
def test_a_large_fleet_compares_few_and_the_holders_among_them(replicas: Any) -> None:
    pool = pool_of(policy(), 1000)
    serving = replicas(pool.replicas)
    for position in (17, 800):
        pool.policy.dispatched(prompt_task(PROMPT), serving[position], Decision(position, "test"))
    for position in range(100, 700):
        pool.policy.dispatched(prompt_task(PROMPT[:100]), serving[position], Decision(position, "test"))
    decisions = [pool.policy.decide(prompt_task(PROMPT), serving) for _ in range(30)]
    assert {decision.position for decision in decisions} == {17, 800}
    for decision in decisions:
        compared = [candidate.position for candidate in decision.candidates]
        assert {17, 800} < set(compared)
        assert len(compared) == len(set(compared)) <= 11


def test_a_large_fleet_finds_its_shortest_queue() -> None:
    pool = pool_of(policy(), 1000)
    for position, replica in enumerate(pool.replicas):
        replica.charge(0 if position == 123 else 5)
    assert pool.policy.select(prompt_task(PROMPT), ServingReplicas(pool.replicas)) == 123


def test_the_same_prompt_object_is_not_hashed_again() -> None:
    prompt = Prompt(PROMPT)
    pool = pool_of(policy(), 2)
    pool.send({"prompt": prompt})
    keys = prompt.known_keys[16]
    pool.policy.decide({"prompt": prompt}, pool.replicas)
    assert prompt.known_keys[16] is keys
