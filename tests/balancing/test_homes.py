"""Where heads that do not know each other's prompts look for one."""

import random
from collections.abc import Callable

import pytest

from tests.balancing.pool import BLOCK, PooledReplica
from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.balancing.base import DecidingBalancer, Task
from vllm_omni_plugin.balancing.decision import Decision
from vllm_omni_plugin.balancing.homes import PromptHomes
from vllm_omni_plugin.balancing.kv_aware import KvAwareBalancer
from vllm_omni_plugin.balancing.matching import Home
from vllm_omni_plugin.balancing.prefix import PrefixBalancer
from vllm_omni_plugin.balancing.prompt import Prompt
from vllm_omni_plugin.balancing.serving import ServingReplicas
from vllm_omni_plugin.balancing.unseen import UnseenRequests

REPLICAS = 20
CONTEXT = 40 * BLOCK


def fleet(heads: int, queue: int = 4) -> ServingReplicas[PooledReplica]:
    """As one head sees it."""
    unseen = UnseenRequests()
    unseen.share_with(heads)
    load = ReplicaLoad(requests=queue, kv_blocks=1000, block_size=BLOCK)
    return ServingReplicas([PooledReplica(number, load) for number in range(REPLICAS)], unseen)


def find(prompt: list[int], known: int = 0) -> Home | None:
    levels = [(known, 1)] if known else []
    return PromptHomes().find(fleet(heads=2), Prompt(prompt), levels, {BLOCK})


def context(number: int) -> list[int]:
    return [number] * CONTEXT


def asks(number: int, question: int) -> Task:
    return {"request_id": f"{number}-{question}", "prompt": Prompt([*context(number), *[1000 + question] * BLOCK])}


def test_all_heads_give_a_prompt_the_same_home() -> None:
    homes = [find([*context(7), *[question] * BLOCK]) for question in range(5)]
    assert len({home.position for home in homes if home is not None}) == 1
    assert None not in homes


def test_homes_are_all_over_the_fleet() -> None:
    positions = {home.position for number in range(200) if (home := find(context(number))) is not None}
    assert len(positions) == REPLICAS


def test_what_differs_only_behind_a_known_beginning_has_different_homes() -> None:
    positions = {
        home.position
        for number in range(40)
        if (home := find([*[1] * BLOCK, *[2 + number] * CONTEXT], known=BLOCK)) is not None
    }
    assert len(positions) > REPLICAS // 2


@pytest.mark.parametrize(
    ("prompt", "known"),
    [(context(1), CONTEXT // 2), ([1] * BLOCK, 0), ([], 0)],
    ids=["known", "shorter than a block", "empty"],
)
def test_a_prompt_that_needs_no_home_has_none(prompt: list[int], known: int) -> None:
    assert find(prompt, known) is None


def test_a_prompt_that_may_not_be_cached_has_no_home() -> None:
    assert PromptHomes().find(fleet(2), Prompt(context(1), cacheable=False), [], {BLOCK}) is None


@pytest.mark.parametrize("policy", [PrefixBalancer, KvAwareBalancer])
def test_heads_that_know_nothing_of_each_other_send_what_belongs_together_to_one_replica(
    policy: Callable[..., DecidingBalancer],
) -> None:
    homes: dict[int, set[int]] = {}
    for head in range(4):
        balancer, replicas = policy(rng=random.Random(head)), fleet(heads=4)
        for number in range(10):
            decision = balancer.decide(asks(number, head), replicas)
            assert decision.reason == "home"
            assert decision.matched_tokens == 0
            homes.setdefault(number, set()).add(decision.position)
    assert all(len(positions) == 1 for positions in homes.values())
    assert len(set.union(*homes.values())) > 5


@pytest.mark.parametrize("policy", [PrefixBalancer, KvAwareBalancer])
def test_a_home_with_too_much_to_do_is_passed_over(policy: Callable[..., DecidingBalancer]) -> None:
    replicas = fleet(heads=4)
    balancer = policy(rng=random.Random(1))
    home = balancer.decide(asks(1, 1), replicas).position
    replicas[home].charge(200)
    replicas.changed(replicas[home])
    assert balancer.decide(asks(1, 2), replicas).position != home


def test_a_head_follows_what_it_knows_and_not_the_home() -> None:
    balancer, replicas = PrefixBalancer(rng=random.Random(1)), fleet(heads=4)
    task = asks(1, 1)
    home = balancer.decide(task, replicas).position
    elsewhere = (home + 1) % REPLICAS
    balancer.dispatched(task, replicas[elsewhere], Decision(elsewhere, "test"))
    decision = balancer.decide(asks(1, 2), replicas)
    assert (decision.position, decision.reason) == (elsewhere, "prefix")


def test_a_home_that_is_known_to_have_the_most_is_no_guess() -> None:
    balancer, replicas = PrefixBalancer(rng=random.Random(1)), fleet(heads=4)
    beginning: Task = {"prompt": Prompt(context(1)[: 4 * BLOCK])}
    # What is unknown of the longer prompt has a home of its own.
    home = PromptHomes().find(replicas, Prompt(context(1)), [(3 * BLOCK, 1)], {BLOCK})
    assert home is not None
    balancer.dispatched(beginning, replicas[home.position], Decision(home.position, "test"))
    decision = balancer.decide(asks(1, 1), replicas)
    assert (decision.position, decision.reason, decision.matched_tokens) == (home.position, "prefix", 3 * BLOCK)


def test_a_head_that_is_alone_spreads_prompts_as_ever() -> None:
    balancer, replicas = PrefixBalancer(rng=random.Random(1)), fleet(heads=1)
    decisions = [balancer.decide(asks(1, question), replicas) for question in range(100)]
    assert {decision.reason for decision in decisions} == {"least-load"}
    assert len({decision.position for decision in decisions}) > REPLICAS // 2
