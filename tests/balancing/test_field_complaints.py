"""Reports of users of other routers about load, cache and session affinity, as scenarios in which our policies do well.

Abbreviations: ps is vllm-project/production-stack, smg is lightseekorg/smg.
"""

import random
from collections import Counter
from typing import Any

import pytest

from vllm_omni_plugin.balancing import (
    Decision,
    KvAwareBalancer,
    LeastQueueLengthBalancer,
    LeastTokensBalancer,
    PrefixBalancer,
    RoundRobinBalancer,
    SessionBalancer,
)

from .pool import BLOCK, Pool, pool_of, prompt_task


def prefix() -> PrefixBalancer:
    return PrefixBalancer(rng=random.Random(0))


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(count)]


def busiest_share(pool: Pool) -> float:
    counts = Counter(replica.replica_id for replica in pool.assigned)
    return max(counts.values()) / len(pool.assigned)


def warm(pool: Pool, position: int, *prompts: list[int]) -> None:
    for prompt in prompts:
        pool.policy.assigned(prompt_task(prompt), pool.replicas[position], Decision(position, ""))


def test_a_shared_system_prompt_does_not_send_all_traffic_to_one_engine() -> None:
    """ps#957: all prompts had a common beginning, so the first engine attracted all of them."""
    pool, system = pool_of(prefix(), 4), tokens(0, 512)
    for question in range(1, 41):
        pool.send(prompt_task(system + tokens(question, 100)))
    assert busiest_share(pool) <= 0.3


def test_an_idle_fleet_does_not_spread_a_shared_prompt() -> None:
    """The opposite of ps#957: single requests stay at the cached beginning."""
    pool, system = pool_of(prefix(), 4), tokens(0, 512)
    for question in range(1, 41):
        pool.send(prompt_task(system + tokens(question, 100)), finish=True)
    assert busiest_share(pool) == 1


def cold_share(policy: Any, in_flight: int) -> float:
    """The share of a cold replica in 600 prompts that three other replicas have cached."""
    contexts, rng = [tokens(seed, 2000) for seed in range(12)], random.Random(0)
    pool = pool_of(policy, 4, kv_blocks=10_000)
    for position in range(3):
        warm(pool, position, *contexts)
    for request in range(600):
        pool.send(prompt_task(rng.choice(contexts)))
        pool.compute()
        if request >= in_flight:
            rng.choice([replica for replica in pool.replicas if replica.queue_length]).charge(-1)
    return sum(replica.replica_id == 3 for replica in pool.assigned) / len(pool.assigned)


def test_a_cold_replica_gets_work_though_all_prompts_are_cached_elsewhere() -> None:
    """sglang#14305: warm engines won every prompt, so a new engine stayed cold."""
    assert cold_share(prefix(), in_flight=60) >= 0.05


def test_a_cold_replica_is_not_warmed_while_the_others_have_time() -> None:
    """The limit of the above: computing 2,000 tokens again pays from 16 more requests on the others."""
    assert cold_share(prefix(), in_flight=40) == 0
    assert cold_share(PrefixBalancer(answer_tokens=512, rng=random.Random(0)), in_flight=40) >= 0.05


def test_rebalancing_takes_the_longest_prefix_among_the_less_busy() -> None:
    """sglang#32195: with imbalanced loads the shortest queue won, and its empty cache made it slower."""
    pool, context = pool_of(prefix(), 3), tokens(0, 4000)
    warm(pool, 0, context)
    warm(pool, 1, context[:3600])
    pool.replicas[0].charge(100)
    pool.replicas[1].charge(1)
    assert pool.policy.decide(prompt_task(context), pool.replicas).position == 1


def test_affinity_returns_after_a_burst() -> None:
    """sglang#32195: requests sent elsewhere must not remove the first replica's cache."""
    pool, context = pool_of(prefix(), 3), tokens(0, 4000)
    warm(pool, 0, context)
    pool.replicas[0].charge(100)
    other = pool.policy.decide(prompt_task(context[:2000] + tokens(1, 2000)), pool.replicas)
    warm(pool, other.position, context[:2000] + tokens(1, 2000))
    pool.replicas[0].charge(-100)
    assert other.position != 0
    assert pool.policy.select(prompt_task(context), pool.replicas) == 0


@pytest.mark.parametrize("queued", [(1, 0, 0, 0), (2, 1, 0, 0), (3, 1, 3, 3)])
def test_a_difference_of_one_request_does_not_leave_a_cached_context(queued: tuple[int, ...]) -> None:
    """smg#2150: at low load a ratio of queue lengths is noise; 18% of requests left their cache."""
    pool, context = pool_of(prefix(), 4), tokens(0, 4000)
    warm(pool, 0, context)
    for replica, requests in zip(pool.replicas, queued, strict=True):
        replica.charge(requests)
    assert pool.policy.decide(prompt_task([*context, *tokens(1, 50)]), pool.replicas).position == 0


def test_sessions_do_not_spill_at_low_load() -> None:
    """smg#2150, for sessions: ten requests over four replicas are never even."""

    def spilled(policy: SessionBalancer) -> float:
        rng, reasons = random.Random(0), list[str]()
        for _ in range(300):
            pool = pool_of(policy, 4)
            for _ in range(10):
                reasons.append(pool.send({"session": f"s{rng.randrange(10_000)}"}).reason)
        return reasons.count("session-spilled") / len(reasons)

    assert spilled(SessionBalancer(load_factor=1.25, slack=0)) > 0.15
    assert spilled(SessionBalancer()) < 0.02


def test_the_estimated_cache_is_bounded_by_the_replicas_memory() -> None:
    """ps#687, ps#711: the trie of all prompts used all memory, and predicted hits on evicted blocks."""
    prompts = [tokens(seed, 800) for seed in range(200)]
    pool = pool_of(prefix(), 1, kv_blocks=500)
    for prompt in prompts:
        pool.send(prompt_task(prompt), finish=True)
    matched = [pool.policy.decide(prompt_task(prompt), pool.replicas).matched_tokens for prompt in prompts]
    assert sum(matched) == 500 * BLOCK
    assert matched[:189] == [0] * 189
    assert matched[190:] == [49 * BLOCK] * 10


def test_a_context_that_is_being_computed_is_not_computed_again_elsewhere() -> None:
    """While a replica computes a shared context, its prefill load must not repel the requests for that context.

    Seen in our own simulator, with tenants of 6,000 tokens each on a fleet that is busy anyway.
    """
    pool, context = pool_of(prefix(), 8, requests=8), tokens(0, 6000)
    for question in range(1, 13):
        pool.send(prompt_task(context + tokens(question, 150)))
    assert len(set(pool.assigned)) == 1


def test_a_hot_session_does_not_thrash_one_replica() -> None:
    """prime-rl#3255: consistent hashing without a bound on load."""

    def busiest(policy: SessionBalancer) -> int:
        pool = pool_of(policy, 4)
        for request in range(100):
            pool.send({"session": "hot" if request % 10 else f"cold-{request}"})
        return max(replica.queue_length for replica in pool.replicas)

    assert busiest(SessionBalancer(load_factor=100)) >= 90
    assert busiest(SessionBalancer()) <= 1.25 * 100 / 4 + 5


def makespan(policy: Any, prompts: list[int]) -> float:
    """Tokens of the busiest of four replicas when all prompts arrive at once."""
    pool = pool_of(policy, 4, prefill_rate=1000.0)
    for number, count in enumerate(prompts):
        # Every prompt begins differently, so caches have no effect.
        pool.send(
            {"request_id": f"{number}", "max_tokens": 1, **prompt_task(range(number << 16, (number << 16) + count))}
        )
    return max(replica.load.prefill_tokens for replica in pool.replicas)


def test_long_contexts_count_by_their_tokens() -> None:
    """vllm#48808, dynamo#14174, vllm-omni#5135: counting requests lost 18-34% of the makespan."""
    by_work = by_requests = 0.0
    for seed in range(20):
        rng = random.Random(seed)
        prompts = [8000 if rng.random() < 0.2 else 200 for _ in range(60)]
        by_work += makespan(LeastTokensBalancer(rng=random.Random(seed)), prompts)
        by_requests += makespan(LeastQueueLengthBalancer(random.Random(seed)), prompts)
    assert by_work < 0.82 * by_requests


@pytest.mark.parametrize("policy", [PrefixBalancer, KvAwareBalancer, LeastTokensBalancer])
def test_a_replica_whose_kv_memory_is_full_gets_nothing_while_another_has_room(policy: Any) -> None:
    """vllm#48808: contexts are counted as requests, and a full replica with fewer of them gets more."""
    pool = pool_of(policy(rng=random.Random(0)), 2, kv_blocks=52_000)
    full, free = pool.replicas
    full.load = full.load._replace(requests=8, decode_tokens=800_000, waiting=6, running=2, kv_usage=0.98)
    free.load = free.load._replace(requests=9, decode_tokens=900, running=9, kv_usage=0.01)
    task = prompt_task(tokens(1, 2000))
    assert {pool.policy.decide(task, pool.replicas).position for _ in range(20)} == {1}


@pytest.mark.parametrize("seed", range(5))
def test_ties_do_not_destroy_the_locality_of_a_conversation(seed: int) -> None:
    """vllm#52463: rotating ties sent every turn to another replica without its cache."""

    def visited(policy: Any) -> int:
        pool = pool_of(policy, 4)
        for turn in range(1, 9):
            pool.send({"session": "conversation", **prompt_task(range(64 * turn))}, finish=True)
        return len(set(pool.assigned))

    assert visited(RoundRobinBalancer()) == 4
    for policy in (SessionBalancer, PrefixBalancer, KvAwareBalancer):
        assert visited(policy(rng=random.Random(seed))) == 1
