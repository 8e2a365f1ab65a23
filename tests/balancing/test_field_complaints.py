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
    LeastTokensBalancer,
    PrefixBalancer,
    RoundRobinBalancer,
    SessionBalancer,
)

from .pool import Pool, pool_of, prompt_task


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


def test_a_context_that_is_being_computed_is_not_computed_again_elsewhere() -> None:
    """While a replica computes a shared context, its prefill load must not repel the requests for that context.

    Seen in our own simulator, with tenants of 6,000 tokens each on a fleet that is busy anyway.
    """
    pool, context = pool_of(prefix(), 8, requests=8), tokens(0, 6000)
    for question in range(1, 13):
        pool.send(prompt_task(context + tokens(question, 150)))
    assert len(set(pool.assigned)) == 1


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
