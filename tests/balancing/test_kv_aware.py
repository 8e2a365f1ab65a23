"""The policy `kv-aware`: hand-computed choices, what it learns from reports, and what it does without them."""

import random
from collections import Counter
from typing import Any

import pytest

from vllm_omni_plugin.balancing import ReplicaLoad, Task
from vllm_omni_plugin.balancing.block_keys import prompt_keys
from vllm_omni_plugin.balancing.cache_change import CacheChange
from vllm_omni_plugin.balancing.decision import Candidate, Decision
from vllm_omni_plugin.balancing.kv_aware import KvAwareBalancer
from vllm_omni_plugin.balancing.prompt import Prompt
from vllm_omni_plugin.errors import ConfigError

from .fakes import with_queues
from .pool import BLOCK, Pool, PooledReplica, pool_of, prompt_task

PROMPT = list(range(1000))
"""62 full blocks of 16, that is 992 tokens, and 8 more tokens."""
KEYS = prompt_keys(Prompt(PROMPT), BLOCK)
ALL = 992
TASK = prompt_task(PROMPT)


def policy(**options: Any) -> KvAwareBalancer:
    return KvAwareBalancer(rng=random.Random(0), **options)


def reporting(count: int, *loads: ReplicaLoad, **options: Any) -> Pool:
    """A pool whose engines have all said that they have nothing cached."""
    pool = pool_of(policy(**options), count)
    for replica, load in zip(pool.replicas, loads, strict=False):
        replica.load = load
    for replica in pool.replicas:
        pool.policy.cache_changed(replica, CacheChange(restart=True))
    return pool


def matched(pool: Pool, task: Task = TASK) -> list[int]:
    """Prompt tokens that each replica is expected to have cached."""
    candidates = sorted(pool.policy.decide(task, pool.replicas).candidates)
    return [candidate.matched_tokens for candidate in candidates]


def fallback(pool: Pool, task: Task = TASK) -> str:
    decision: Decision = pool.policy.decide(task, pool.replicas)
    return decision.fallback


@pytest.mark.parametrize(
    ("loads", "scores", "chosen", "reason"),
    [
        pytest.param([ReplicaLoad(), ReplicaLoad()], [8, 1000], 0, "prefix", id="idle"),
        pytest.param([ReplicaLoad(requests=7), ReplicaLoad()], [928, 1000], 0, "prefix", id="worth the wait"),
        pytest.param([ReplicaLoad(requests=8), ReplicaLoad()], [1056, 1000], 1, "prefix-spilled", id="too busy"),
        pytest.param(
            [ReplicaLoad(requests=1, prefill_tokens=900), ReplicaLoad()],
            [1044, 1000],
            1,
            "prefix-spilled",
            id="prefill waits",
        ),
    ],
)
def test_the_least_delay_of_all_requests_wins(
    loads: list[ReplicaLoad], scores: list[float], chosen: int, reason: str
) -> None:
    pool = reporting(2, *loads)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    assert pool.policy.decide(TASK, pool.replicas) == Decision(
        chosen, reason, (Candidate(0, scores[0], ALL), Candidate(1, scores[1])), "", ALL if chosen == 0 else 0
    )


def test_the_weight_of_overlap_makes_affinity_stronger_or_void() -> None:
    for weight, chosen in ((0.0, 1), (0.5, 1), (2.0, 0)):
        pool = reporting(2, ReplicaLoad(requests=7), overlap_weight=weight)
        pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
        assert pool.policy.decide(TASK, pool.replicas).position == chosen


def test_equal_costs_go_to_the_longest_match_and_then_anywhere() -> None:
    pool = reporting(3, overlap_weight=0)
    pool.policy.cache_changed(pool.replicas[1], CacheChange(KEYS))
    assert {pool.policy.select(TASK, pool.replicas) for _ in range(20)} == {1}
    other = prompt_task(list(range(5000, 6000)))
    assert Counter(pool.policy.select(other, pool.replicas) for _ in range(300)).keys() == {0, 1, 2}


def test_temperature_gives_the_others_a_share() -> None:
    pool = reporting(2, temperature=1.0)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    counts = Counter(pool.policy.select(TASK, pool.replicas) for _ in range(2000))
    # Softmax of 0 and -1: 73% and 27%.
    assert 1350 < counts[0] < 1570


def test_blocks_are_known_from_their_report_to_their_removal() -> None:
    pool = reporting(2)
    replica = pool.replicas[1]
    pool.policy.cache_changed(replica, CacheChange(KEYS[:10]))
    assert matched(pool) == [0, 160]
    pool.policy.cache_changed(replica, CacheChange(removed=KEYS[5:10]))
    assert matched(pool) == [0, 80]
    pool.policy.cache_changed(replica, CacheChange(KEYS[5:]))
    assert matched(pool) == [0, ALL]
    pool.policy.cache_changed(replica, CacheChange(restart=True))
    assert matched(pool) == [0, 0]
    assert fallback(pool) == ""


def test_prompts_of_other_adapters_and_salts_match_nothing() -> None:
    pool = reporting(1)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    for other in ({"lora_name": "a"}, {"cache_salt": "s"}):
        assert matched(pool, prompt_task(PROMPT, **other)) == [0]
    assert matched(pool, prompt_task(PROMPT)) == [ALL]


def test_what_is_in_flight_counts_as_cached_until_its_last_request_ends() -> None:
    pool = reporting(2)
    first, second = prompt_task(PROMPT), prompt_task(PROMPT[:500])
    for task in (first, second):
        pool.policy.dispatched(task, pool.replicas[0], Decision(0, "test"))
    assert matched(pool) == [ALL, 0]
    pool.policy.ended(first, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [496, 0]
    pool.policy.ended(second, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [0, 0]


def test_what_was_reported_outlives_the_request() -> None:
    pool = reporting(1)
    pool.policy.dispatched(TASK, pool.replicas[0], Decision(0, "test"))
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    pool.policy.ended(TASK, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [ALL]


def test_a_replica_that_never_reported_is_judged_by_what_was_sent_to_it() -> None:
    pool = pool_of(policy(), 2)
    assert fallback(pool) == "no-events"
    pool.send(TASK, finish=True)
    task: Task = prompt_task(PROMPT)
    pool.policy.ended(TASK, pool.dispatched[0], 1.0, 1)
    assert sorted(matched(pool, task)) == [0, ALL]


def test_answers_count_where_nobody_reports_them() -> None:
    pool = pool_of(policy(), 1)
    task = prompt_task(PROMPT[:100])
    pool.policy.dispatched(task, pool.replicas[0], Decision(0, "test"))
    task["answer_ids"] = PROMPT[100:200]
    pool.policy.ended(task, pool.replicas[0], 1.0, 100)
    assert matched(pool) == [192]


def test_after_lost_reports_what_was_sent_counts_again() -> None:
    pool = reporting(2)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    pool.policy.dispatched(TASK, pool.replicas[0], Decision(0, "test"))
    pool.policy.ended(TASK, pool.replicas[0], 1.0, 1)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(restart=True, complete=False))
    assert matched(pool) == [ALL, 0]
    assert fallback(pool) == "stale-events"
    pool.policy.cache_changed(pool.replicas[0], CacheChange(restart=True))
    assert matched(pool) == [0, 0]
    assert fallback(pool) == ""


def test_what_is_in_flight_when_reports_are_lost_counts_and_still_does_after_its_end() -> None:
    pool = reporting(2)
    first, second = prompt_task(PROMPT), prompt_task(PROMPT[:500])
    for task in (first, second):
        pool.policy.dispatched(task, pool.replicas[0], Decision(0, "test"))
    pool.policy.ended(second, pool.replicas[0], 1.0, 1)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(restart=True, complete=False))
    assert matched(pool) == [ALL, 0]
    pool.policy.ended(first, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [ALL, 0]


def test_once_reports_are_caught_up_they_alone_count_and_if_lost_again_all_that_was_sent_meanwhile() -> None:
    pool = reporting(1)
    replica, other = pool.replicas[0], prompt_task(list(range(5000, 6000)))
    pool.policy.cache_changed(replica, CacheChange(restart=True, complete=False))
    pool.policy.dispatched(TASK, replica, Decision(0, "test"))
    pool.policy.ended(TASK, replica, 1.0, 1)
    assert matched(pool) == [ALL]
    pool.policy.cache_changed(replica, CacheChange(KEYS[:10]))
    assert (matched(pool), fallback(pool)) == ([160], "")
    pool.policy.dispatched(other, replica, Decision(0, "test"))
    pool.policy.ended(other, replica, 1.0, 1)
    assert (matched(pool), matched(pool, other)) == ([160], [0])
    pool.policy.cache_changed(replica, CacheChange(complete=False))
    assert (matched(pool), matched(pool, other)) == ([ALL], [ALL])


def test_what_an_engine_must_have_evicted_while_it_reported_does_not_count_when_reports_are_lost() -> None:
    pool = reporting(1, ReplicaLoad(kv_blocks=100, block_size=BLOCK))
    for task in (TASK, prompt_task(list(range(5000, 6000)))):
        pool.policy.dispatched(task, pool.replicas[0], Decision(0, "test"))
        pool.policy.ended(task, pool.replicas[0], 1.0, 1)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(restart=True, complete=False))
    assert matched(pool) == [(100 - 62) * BLOCK]


@pytest.mark.parametrize("by_report", [True, False])
def test_what_was_sent_before_a_cache_was_cleared_does_not_count_when_reports_are_lost(by_report: bool) -> None:
    pool = reporting(1)
    ended, in_flight = prompt_task(PROMPT[:500]), prompt_task(PROMPT)
    for task in (ended, in_flight):
        pool.policy.dispatched(task, pool.replicas[0], Decision(0, "test"))
    pool.policy.ended(ended, pool.replicas[0], 1.0, 1)
    if by_report:
        pool.policy.cache_changed(pool.replicas[0], CacheChange(restart=True))
    else:
        pool.policy.cleared(pool.replicas[0])
    pool.policy.cache_changed(pool.replicas[0], CacheChange(restart=True, complete=False))
    pool.policy.ended(in_flight, pool.replicas[0], 1.0, 1)
    assert matched(pool) == [0]


def test_a_place_is_clean_for_another_replica_that_reports_nothing() -> None:
    pool = reporting(2)
    for task in (prompt_task(PROMPT[:500]), TASK):
        pool.policy.dispatched(task, pool.replicas[0], Decision(0, "test"))
    pool.policy.forgotten(pool.replicas[0])
    newcomer = Pool(pool.policy, (PooledReplica(7, pool.replicas[0].load), pool.replicas[1]))
    assert matched(newcomer) == [0, 0]
    pool.policy.dispatched(TASK, newcomer.replicas[0], Decision(0, "test"))
    assert (matched(newcomer), fallback(newcomer)) == ([ALL, 0], "no-events")


def test_one_replica_without_reports_is_enough_to_say_so() -> None:
    pool = reporting(3)
    pool.policy.cache_changed(pool.replicas[1], CacheChange(complete=False))
    assert fallback(pool) == "stale-events"
    pool.policy.forgotten(pool.replicas[2])
    assert fallback(pool) == "no-events"


def test_a_lost_replica_has_nothing_cached_or_in_flight_and_its_place_is_clean_for_another() -> None:
    pool = reporting(2)
    lost = pool.replicas[0]
    pool.policy.cache_changed(lost, CacheChange(KEYS))
    pool.policy.dispatched(TASK, lost, Decision(0, "test"))
    pool.policy.forgotten(lost)
    pool.policy.forgotten(lost)
    assert matched(pool) == [0, 0]
    newcomer = Pool(pool.policy, (PooledReplica(7, lost.load), pool.replicas[1]))
    pool.policy.cache_changed(newcomer.replicas[0], CacheChange(restart=True))
    assert matched(newcomer) == [0, 0]
    assert fallback(newcomer) == ""


def test_a_cleared_cache_is_empty_before_its_engine_says_so() -> None:
    pool = reporting(2)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    pool.policy.dispatched(TASK, pool.replicas[1], Decision(1, "test"))
    for replica in pool.replicas:
        pool.policy.cleared(replica)
    assert matched(pool) == [0, 0]
    assert fallback(pool) == ""
    pool.policy.ended(TASK, pool.replicas[1], 1.0, 1)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS[:2], restart=True))
    assert matched(pool) == [32, 0]


def test_what_a_replica_without_reports_had_is_void_once_its_cache_is_cleared() -> None:
    pool = pool_of(policy(), 1)
    pool.policy.dispatched(TASK, pool.replicas[0], Decision(0, "test"))
    pool.policy.cleared(pool.replicas[0])
    assert matched(pool) == [0]
    assert fallback(pool) == "no-events"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        pytest.param({}, "no-prompt", id="nothing known"),
        pytest.param(prompt_task(PROMPT, cacheable=False), "uncacheable", id="not cacheable"),
    ],
)
def test_without_a_prompt_to_look_up_load_decides(task: Task, why: str) -> None:
    pool = reporting(2, ReplicaLoad(requests=1), ReplicaLoad())
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    decision = pool.policy.decide(task, pool.replicas)
    assert (decision.position, decision.reason, decision.fallback) == (1, "least-load", why)


def test_replicas_that_say_nothing_of_themselves_can_be_chosen_from() -> None:
    replicas = with_queues(3, 0)
    assert policy().select(TASK, replicas) in (0, 1)
    with pytest.raises(ValueError, match="replicas must not be empty"):
        policy().decide(TASK, [])


def test_of_many_replicas_the_holder_is_compared() -> None:
    pool = reporting(1024)
    pool.policy.cache_changed(pool.replicas[700], CacheChange(KEYS))
    decision = pool.policy.decide(TASK, pool.replicas)
    assert (decision.position, decision.matched_tokens) == (700, ALL)
    assert len(decision.candidates) < 20


def test_deciding_changes_nothing() -> None:
    pool = reporting(2)
    pool.policy.cache_changed(pool.replicas[0], CacheChange(KEYS))
    decisions = [pool.policy.decide(prompt_task(PROMPT), pool.replicas) for _ in range(10)]
    assert decisions == [decisions[0]] * 10


@pytest.mark.parametrize(
    ("option", "value"), [("overlap_weight", -0.1), ("temperature", -1), ("temperature", float("nan"))]
)
def test_options_out_of_range_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=option):
        policy(**{option: value})
