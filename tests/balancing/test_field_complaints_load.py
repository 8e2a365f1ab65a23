"""What users of other balancers report about load and its policies, each a test that fails on what they had.

The scenarios are small models without a clock: a replica computes the prompts it was given one after the other.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from vllm_omni_plugin.balancing import (
    CostAwareBalancer,
    DecidingBalancer,
    Decision,
    KvAwareBalancer,
    LeastQueueLengthBalancer,
    LeastTokensBalancer,
    PrefixBalancer,
    Prompt,
    ReplicaLoad,
    ReplicaView,
    RoundRobinBalancer,
    SessionBalancer,
    Task,
)

from .fakes import FakeReplica

RATE = 1000.0
"""Prompt tokens per second of a replica in these scenarios."""


@dataclass(eq=False)
class QueueingReplica:
    """A replica whose load is what it was given; nothing ends in these scenarios."""

    input_addr: str
    output_addr: str = "tcp://head:1"
    stage_id: int = 0
    prompts: list[int] = field(default_factory=list)

    @property
    def queue_length(self) -> int:
        return len(self.prompts)

    @property
    def load(self) -> ReplicaLoad:
        return ReplicaLoad(requests=len(self.prompts), prefill_tokens=sum(self.prompts), prefill_rate=RATE)


def prompt_task(number: int, tokens: int) -> Task:
    # Every prompt begins differently: nothing here is about caches.
    return {"request_id": str(number), "prompt": Prompt(range(number << 16, (number << 16) + tokens)), "max_tokens": 1}


def dispatch(balancer: DecidingBalancer, task: Task, replicas: Sequence[ReplicaView]) -> int:
    """Choose as the pool does, and tell the policy if it wants to know."""
    decision = balancer.decide(task, replicas)
    told: Callable[[Task, ReplicaView, Decision], None] | None = getattr(balancer, "dispatched", None)
    if told is not None:
        told(task, replicas[decision.position], decision)
    return decision.position


def makespan(balancer: DecidingBalancer, prompts: Iterable[int], count: int) -> float:
    """Seconds until the last of `count` replicas has computed what it got, all prompts arriving at once."""
    replicas = [QueueingReplica(f"tcp://replica:{port}") for port in range(count)]
    for number, tokens in enumerate(prompts):
        replicas[dispatch(balancer, prompt_task(number, tokens), replicas)].prompts.append(tokens)
    return max(sum(replica.prompts) for replica in replicas) / RATE


def mixed_prompts(seed: int) -> list[int]:
    """A fifth are long contexts of 8,000 tokens, the others have 200."""
    rng = random.Random(seed)
    return [8000 if rng.random() < 0.2 else 200 for _ in range(60)]


@pytest.mark.parametrize("policy", [LeastTokensBalancer, CostAwareBalancer])
def test_long_contexts_are_work_and_not_one_request_each(
    policy: type[LeastTokensBalancer] | type[CostAwareBalancer],
) -> None:
    """vllm#48808, dynamo#14174, vllm-omni#5135: counting requests lost 18-34% of the makespan."""
    by_work = by_requests = 0.0
    for seed in range(20):
        prompts = mixed_prompts(seed)
        by_work += makespan(policy(rng=random.Random(seed)), prompts, count=4)
        by_requests += makespan(LeastQueueLengthBalancer(random.Random(seed)), prompts, count=4)
    assert by_work < 0.82 * by_requests


def conversation(balancer: DecidingBalancer, turns: int) -> list[int]:
    """Where the turns of one conversation go while all replicas are equally idle."""
    replicas = [FakeReplica(f"tcp://replica:{port}", load=ReplicaLoad(block_size=16)) for port in range(4)]
    turn = {"session": "conversation"}
    return [
        dispatch(balancer, {**turn, "request_id": str(number), "prompt": Prompt(range(64 * number))}, replicas)  # type: ignore[typeddict-item]
        for number in range(1, turns + 1)
    ]


@pytest.mark.parametrize("policy", [SessionBalancer, PrefixBalancer, KvAwareBalancer])
@pytest.mark.parametrize("seed", range(5))
def test_ties_do_not_destroy_the_locality_of_a_conversation(policy: Callable[..., DecidingBalancer], seed: int) -> None:
    """vllm#52463: rotating ties sent every turn to another replica, where nothing of it was cached."""
    assert len(set(conversation(policy(rng=random.Random(seed)), turns=8))) == 1


def test_rotation_does_destroy_it() -> None:
    """The same conversation, to see that the test above can fail."""
    assert len(set(conversation(RoundRobinBalancer(), turns=8))) == 4
