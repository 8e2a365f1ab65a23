"""Rendezvous hashing: even spread, few moves, and equal results on all heads."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from vllm_omni_plugin.balancing import (
    Decision,
    PrefixBalancer,
    Prompt,
    ReplicaLoad,
    ServingReplicas,
    Task,
    UnreportedRequests,
)
from vllm_omni_plugin.balancing.caches.rendezvous import ExpectedPrefix, RendezvousTable, expected_prefix

from .pool import BLOCK, PooledReplica

SESSIONS = [f"session-{number}".encode() for number in range(10_000)]


def names(numbers: Iterable[int]) -> list[bytes]:
    return [str(number).encode() for number in numbers]


def owners(table: RendezvousTable, members: list[bytes]) -> list[bytes]:
    table.set_members(members)
    return [members[table.position(session)] for session in SESSIONS]


def moved(before: list[bytes], after: list[bytes]) -> set[tuple[bytes, bytes]]:
    return {(left, right) for left, right in zip(before, after, strict=True) if left != right}


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_sessions_are_spread_evenly(count: int) -> None:
    shares = Counter(owners(RendezvousTable(), names(range(count))))
    assert len(shares) == count
    assert max(shares.values()) / len(SESSIONS) < 1 / count + 0.02


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_a_change_of_members_moves_only_their_share(count: int) -> None:
    table, members = RendezvousTable(), names(range(count + 1))
    before = owners(table, members[:-1])
    joined = owners(table, members)
    assert {to for _, to in moved(before, joined)} == {members[-1]}
    left = owners(table, members[1:])
    assert {origin for origin, _ in moved(joined, left)} == {members[0]}
    for one, other in ((before, joined), (joined, left)):
        assert sum(map(bytes.__ne__, one, other)) / len(SESSIONS) < 1 / (count + 1) + 0.02


@pytest.mark.parametrize("joiners", [1, 20])
def test_the_order_of_events_does_not_matter(joiners: int) -> None:
    table, members = RendezvousTable(), names(range(30))
    for end in range(1, len(members) + 1, joiners):
        owners(table, members[:end])
    assert owners(table, members) == owners(RendezvousTable(), members)


REPLICAS = 20
CONTEXT = 40 * BLOCK


def fleet(heads: int) -> ServingReplicas[PooledReplica]:
    unreported = UnreportedRequests()
    unreported.set_heads(heads)
    load = ReplicaLoad(requests=4, kv_blocks=1000, block_size=BLOCK)
    return ServingReplicas([PooledReplica(number, load) for number in range(REPLICAS)], unreported)


def find(prompt: list[int], known: int = 0, cacheable: bool = True) -> ExpectedPrefix | None:
    levels = [(known, 1)] if known else []
    return expected_prefix(RendezvousTable(), fleet(heads=2), Prompt(prompt, cacheable=cacheable), levels, {BLOCK})


def positions(prompts: Iterable[list[int]], known: int = 0) -> set[int]:
    return {expected.position for prompt in prompts if (expected := find(prompt, known)) is not None}


def context(number: int) -> list[int]:
    return [number] * CONTEXT


def asks(number: int, question: int) -> Task:
    return {"request_id": f"{number}-{question}", "prompt": Prompt([*context(number), *[1000 + question] * BLOCK])}


def policy(seed: int = 1) -> PrefixBalancer:
    return PrefixBalancer(rng=random.Random(seed))


def test_prompts_with_a_common_beginning_are_expected_at_one_replica() -> None:
    assert len(positions([*context(7), *[question] * BLOCK] for question in range(5))) == 1
    assert len(positions(map(context, range(200)))) == REPLICAS


def test_prompts_that_differ_after_a_known_beginning_are_expected_at_different_replicas() -> None:
    prompts = [[*[1] * BLOCK, *[2 + number] * CONTEXT] for number in range(40)]
    assert len(positions(prompts, known=BLOCK)) > REPLICAS // 2


@pytest.mark.parametrize(
    ("prompt", "known", "cacheable"),
    [(context(1), CONTEXT // 2, True), ([1] * BLOCK, 0, True), ([], 0, True), (context(1), 0, False)],
    ids=["known", "shorter than a block", "empty", "uncacheable"],
)
def test_an_uncacheable_or_known_prompt_is_expected_nowhere(prompt: list[int], known: int, cacheable: bool) -> None:
    assert find(prompt, known, cacheable) is None


def test_independent_heads_send_related_prompts_to_one_replica() -> None:
    chosen: dict[int, set[int]] = {}
    for head in range(4):
        balancer, replicas = policy(head), fleet(heads=4)
        for number in range(10):
            decision = balancer.decide(asks(number, head), replicas)
            assert (decision.reason, decision.matched_tokens) == ("rendezvous", 0)
            chosen.setdefault(number, set()).add(decision.position)
    assert all(len(places) == 1 for places in chosen.values())
    assert len(set.union(*chosen.values())) > 5


def test_a_busy_rendezvous_replica_is_passed_over() -> None:
    balancer, replicas = policy(), fleet(heads=4)
    expected = balancer.decide(asks(1, 1), replicas).position
    replicas[expected].charge(200)
    replicas.queue_lengths[expected] += 200
    assert balancer.decide(asks(1, 2), replicas).position != expected


def test_a_known_match_has_precedence_over_rendezvous() -> None:
    balancer, replicas = policy(), fleet(heads=4)
    elsewhere = (balancer.decide(asks(1, 1), replicas).position + 1) % REPLICAS
    balancer.assigned(asks(1, 1), replicas[elsewhere], Decision(elsewhere, "test"))
    decision = balancer.decide(asks(1, 2), replicas)
    assert (decision.position, decision.reason) == (elsewhere, "prefix")


def test_a_single_head_expects_prompts_nowhere() -> None:
    balancer, replicas = policy(), fleet(heads=1)
    decisions = [balancer.decide(asks(1, question), replicas) for question in range(100)]
    assert {decision.reason for decision in decisions} == {"least-load"}
    assert len({decision.position for decision in decisions}) > REPLICAS // 2
