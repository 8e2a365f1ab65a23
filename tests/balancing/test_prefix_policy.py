"""The policies `prefix` and `kv-aware`, by hand-computed cases."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from vllm_omni_plugin.balancing import (
    CacheChange,
    Candidate,
    Decision,
    KvAwareBalancer,
    PrefixBalancer,
    Prompt,
    ReplicaLoad,
    Task,
)
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys

from .pool import BLOCK, Pool, PooledReplica, pool_of, prompt_task

PROMPT = list(range(1000))
"""62 full blocks of 16, that is 992 tokens, and 8 more tokens."""
KEYS = prompt_keys(Prompt(PROMPT), BLOCK)
ALL = 992
TASK = prompt_task(PROMPT)
ANYWHERE = Decision(0, "test")
RESTART, LOST = CacheChange(restart=True), CacheChange(restart=True, complete=False)


def policy(**options: Any) -> PrefixBalancer:
    return PrefixBalancer(rng=random.Random(0), **options)


def estimating(*loads: ReplicaLoad, **options: Any) -> Pool:
    """A pool of engines without reports."""
    return Pool(policy(**options), tuple(PooledReplica(number, load) for number, load in enumerate(loads)))


def reporting(*loads: ReplicaLoad, **options: Any) -> Pool:
    """A pool of engines that have reported an empty cache."""
    pool = estimating(*loads, **options)
    for replica in pool.replicas:
        pool.policy.cache_changed(replica, RESTART)
    return pool


def is_sent(pool: Pool, position: int) -> None:
    pool.policy.assigned(prompt_task(PROMPT), pool.replicas[position], ANYWHERE)


def is_reported(pool: Pool, position: int) -> None:
    pool.policy.cache_changed(pool.replicas[position], CacheChange(KEYS))


def matched(pool: Pool, task: Task = TASK) -> list[int]:
    return [candidate.matched_tokens for candidate in sorted(pool.policy.decide(task, pool.replicas).candidates)]


Cached = Callable[[Pool, int], None]
by_estimate_and_by_report = pytest.mark.parametrize(
    ("made", "cached"),
    [pytest.param(estimating, is_sent, id="estimated"), pytest.param(reporting, is_reported, id="reported")],
)


@by_estimate_and_by_report
@pytest.mark.parametrize(
    ("loads", "scores", "chosen", "reason"),
    [
        pytest.param([ReplicaLoad(), ReplicaLoad()], [8, 1000], 0, "prefix", id="idle"),
        pytest.param([ReplicaLoad(requests=7), ReplicaLoad()], [928, 1000], 0, "prefix", id="worth-the-wait"),
        pytest.param([ReplicaLoad(requests=8), ReplicaLoad()], [1056, 1000], 1, "prefix-spilled", id="too-busy"),
        pytest.param(
            [ReplicaLoad(1, prefill_tokens=900), ReplicaLoad()], [1044, 1000], 1, "prefix-spilled", id="prefill"
        ),
        pytest.param([ReplicaLoad(1, prefill_tokens=800), ReplicaLoad()], [944, 1000], 0, "prefix", id="less-work"),
        pytest.param([ReplicaLoad(requests=30), ReplicaLoad(requests=9)], [3872, 5152], 0, "prefix", id="all-busy"),
        pytest.param([ReplicaLoad(1, 0, 0, 120_000), ReplicaLoad()], [1344, 1000], 1, "prefix-spilled", id="contexts"),
        pytest.param([ReplicaLoad(1, kv_usage=0.5), ReplicaLoad()], [1644, 1000], 1, "prefix-spilled", id="half-full"),
        pytest.param([ReplicaLoad(1, kv_usage=0.2), ReplicaLoad()], [519, 1000], 0, "prefix", id="a-fifth-full"),
    ],
)
def test_the_least_added_latency_wins(
    made: Callable[..., Pool], cached: Cached, loads: list[ReplicaLoad], scores: list[float], chosen: int, reason: str
) -> None:
    pool = made(*loads)
    cached(pool, 0)
    assert pool.policy.decide(TASK, pool.replicas) == Decision(
        chosen, reason, (Candidate(0, scores[0], ALL), Candidate(1, scores[1])), "", ALL if chosen == 0 else 0
    )


@pytest.mark.parametrize(("weight", "chosen"), [(0.0, 1), (0.5, 1), (2.0, 0)])
def test_the_overlap_weight_changes_affinity(weight: float, chosen: int) -> None:
    pool = estimating(ReplicaLoad(requests=7), ReplicaLoad(), overlap_weight=weight)
    is_sent(pool, 0)
    assert pool.policy.decide(TASK, pool.replicas).position == chosen


def test_a_temperature_gives_other_replicas_a_share() -> None:
    pool = estimating(ReplicaLoad(), ReplicaLoad(), temperature=1.0)
    is_sent(pool, 0)
    counts = Counter(pool.policy.select(TASK, pool.replicas) for _ in range(2000))
    # Softmax of 0 and -1: 73% and 27%.
    assert 1350 < counts[0] < 1570


def test_equal_costs_go_to_the_longest_match_then_at_random() -> None:
    pool = pool_of(policy(overlap_weight=0), 3)
    is_sent(pool, 1)
    assert {pool.policy.select(TASK, pool.replicas) for _ in range(20)} == {1}
    other = prompt_task(list(range(5000, 6000)))
    chosen = Counter(pool.policy.select(other, pool.replicas) for _ in range(300))
    assert min(chosen[position] for position in range(3)) > 60


@by_estimate_and_by_report
def test_a_decision_changes_no_state(made: Callable[..., Pool], cached: Cached) -> None:
    pool = made(ReplicaLoad(), ReplicaLoad())
    for _ in range(3):
        assert pool.policy.decide(TASK, pool.replicas).reason == "least-load"
    cached(pool, 0)
    decisions = [pool.policy.decide(prompt_task(PROMPT), pool.replicas) for _ in range(10)]
    assert decisions == [decisions[0]] * 10


def test_a_request_is_cached_where_it_was_sent() -> None:
    pool = pool_of(policy(), 2)
    decision = pool.policy.decide(TASK, pool.replicas)
    bound = 1 - decision.position
    pool.policy.assigned(TASK, pool.replicas[bound], decision)
    assert pool.policy.select(TASK, pool.replicas) == bound


def test_the_answer_is_cached_for_the_next_turn() -> None:
    pool, task = pool_of(policy(), 2), prompt_task(PROMPT)
    first = pool.send(task, finish=True)
    answer = list(range(5000, 5100))
    pool.policy.ended(task | {"answer_ids": answer}, pool.replicas[first.position], 1.0, 100)
    second = pool.policy.decide(prompt_task([*PROMPT, *answer, *range(7000, 7050)]), pool.replicas)
    # 1,099 tokens were computed, in 68 full blocks.
    assert (second.position, second.matched_tokens) == (first.position, 68 * BLOCK)


@by_estimate_and_by_report
def test_a_lost_replicas_cache_is_dropped_and_its_bit_reused(made: Callable[..., Pool], cached: Cached) -> None:
    pool = made(ReplicaLoad(), ReplicaLoad())
    for position in (0, 1):
        cached(pool, position)
        is_sent(pool, position)
    pool.policy.replica_lost(pool.replicas[0])
    pool.policy.replica_lost(pool.replicas[0])
    newcomer = Pool(pool.policy, (PooledReplica(7, ReplicaLoad()), pool.replicas[1]))
    assert matched(newcomer) == [0, ALL]
    is_sent(newcomer, 0)
    assert matched(newcomer) == [ALL, ALL]


@by_estimate_and_by_report
def test_a_cleared_cache_is_empty(made: Callable[..., Pool], cached: Cached) -> None:
    pool = made(ReplicaLoad(), ReplicaLoad())
    cached(pool, 0)
    is_sent(pool, 1)
    for replica in pool.replicas:
        pool.policy.cache_cleared(replica)
    assert matched(pool) == [0, 0]
    pool.policy.ended(TASK, pool.replicas[1], 1.0, 1)
    cached(pool, 0)
    assert matched(pool) == [ALL, 0]


def test_blocks_are_known_from_their_report_to_their_removal() -> None:
    pool = reporting(ReplicaLoad(), ReplicaLoad())
    for change, known in (
        (CacheChange(KEYS[:10]), 160),
        (CacheChange(removed=KEYS[5:10]), 80),
        (CacheChange(KEYS[5:]), ALL),
        (RESTART, 0),
    ):
        pool.policy.cache_changed(pool.replicas[1], change)
        assert matched(pool) == [0, known]


def test_an_unreported_prompt_counts_as_cached_until_its_last_request_ends() -> None:
    pool = reporting(ReplicaLoad(), ReplicaLoad())
    first, second = prompt_task(PROMPT), prompt_task(PROMPT[:500])
    for task in (first, second):
        pool.policy.assigned(task, pool.replicas[0], ANYWHERE)
    assert matched(pool) == [ALL, 0]
    pool.policy.ended(first, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [496, 0]
    pool.policy.ended(second, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [0, 0]


def test_after_lost_reports_the_cache_is_empty_and_estimated_until_a_restart() -> None:
    pool = reporting(ReplicaLoad(), ReplicaLoad())
    is_reported(pool, 0)
    is_sent(pool, 0)
    pool.policy.cache_changed(pool.replicas[0], LOST)
    assert matched(pool) == [0, 0]
    pool.policy.ended(prompt_task(PROMPT) | {"answer_ids": [1]}, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [ALL, 0]
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS[:10], restart=True))
    assert matched(pool) == [160, 0]


def test_long_churn_of_reports_leaves_what_was_reported_last() -> None:
    pool = reporting(ReplicaLoad())
    for key in range(1, 10_000):
        pool.policy.cache_changed(pool.replicas[0], CacheChange([key], [key - 1]))
    is_reported(pool, 0)
    assert matched(pool) == [ALL]
    pool.policy.cache_changed(pool.replicas[0], RESTART)
    assert matched(pool) == [0]


def test_kv_aware_has_a_fallback_without_reports() -> None:
    pool = estimating(ReplicaLoad(), ReplicaLoad())
    kv_aware = KvAwareBalancer(rng=random.Random(0))
    assert (kv_aware.wants_cache_events, pool.policy.wants_cache_events) == (True, False)
    for change, fallback in ((RESTART, "no-events"), (LOST, "no-events")):
        kv_aware.cache_changed(pool.replicas[0], change)
        assert kv_aware.decide(TASK, pool.replicas).fallback == fallback
        assert pool.policy.decide(TASK, pool.replicas).fallback == ""
    for replica in pool.replicas:
        kv_aware.cache_changed(replica, RESTART)
    assert kv_aware.decide(TASK, pool.replicas).fallback == ""


def test_a_replica_that_takes_no_new_work_is_not_chosen_for_its_cache() -> None:
    pool, task = pool_of(policy(), 20), prompt_task(PROMPT)
    holder = pool.send(task, finish=True).position
    others = tuple(replica for position, replica in enumerate(pool.replicas) if position != holder)
    assert pool.policy.decide(task, others).matched_tokens == 0
    assert pool.policy.decide(task, pool.replicas).position == holder


@by_estimate_and_by_report
@pytest.mark.parametrize(
    ("task", "fallback"),
    [
        pytest.param({}, "no-prompt", id="no-prompt"),
        pytest.param(prompt_task(PROMPT, cacheable=False), "uncacheable", id="uncacheable"),
        pytest.param(prompt_task([]), "", id="empty-prompt"),
        pytest.param(prompt_task([1, 2, 3]), "", id="less-than-a-block"),
    ],
)
def test_without_blocks_load_decides(made: Callable[..., Pool], cached: Cached, task: Any, fallback: str) -> None:
    pool = made(ReplicaLoad(requests=1), ReplicaLoad(), ReplicaLoad(requests=2))
    cached(pool, 0)
    decision = pool.policy.decide(task, pool.replicas)
    assert (decision.position, decision.reason, decision.fallback) == (1, "least-load", fallback)


def test_block_sizes_may_differ_also_after_a_restart() -> None:
    pool = estimating(*[ReplicaLoad(block_size=16 << number) for number in range(3)])
    for position in range(3):
        is_sent(pool, position)
    assert matched(pool) == [992, 992, 960]
    pool.policy.replica_lost(pool.replicas[0])
    pool.replicas[0].load = ReplicaLoad(block_size=128)
    is_sent(pool, 0)
    assert matched(pool) == [896, 992, 960]


@by_estimate_and_by_report
def test_a_large_fleet_compares_a_few_replicas_including_holders(made: Callable[..., Pool], cached: Cached) -> None:
    pool = made(*[ReplicaLoad()] * 1000)
    serving = pool.replicas
    for position in (17, 800):
        cached(pool, position)
    for position in range(100, 700):
        pool.policy.assigned(prompt_task(PROMPT[:100]), serving[position], ANYWHERE)
    decisions = [pool.policy.decide(TASK, serving) for _ in range(30)]
    assert {decision.position for decision in decisions} == {17, 800}
    for decision in decisions:
        compared = [candidate.position for candidate in decision.candidates]
        assert {17, 800} < set(compared)
        assert len(compared) == len(set(compared)) <= 11
