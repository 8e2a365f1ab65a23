"""Requests of a LoRA adapter gather where it is loaded, by hand-computed cases."""

import random
from typing import Any

import pytest

from vllm_omni_plugin.balancing import (
    KvAwareBalancer,
    LeastTokensBalancer,
    PrefixBalancer,
    Prompt,
    ReplicaAdapters,
    ReplicaLoad,
    Task,
)
from vllm_omni_plugin.balancing.replica_adapters import ADAPTER_TOKENS, adapter_costs
from vllm_omni_plugin.balancing.sampling import positions_to_compare

from .fakes import with_loads

TASK: Task = {"prompt": Prompt(range(100), "a")}
LOADS, MAKES_WAY, NO_SLOT = ADAPTER_TOKENS, 1.5 * ADAPTER_TOKENS, 2 * ADAPTER_TOKENS
HAS_IT = ReplicaAdapters(2, {}, ("x", "a"))
HAS_OTHERS = ReplicaAdapters(2, {}, ("x", "y"))
HAS_ROOM = ReplicaAdapters(2, {}, ("y",))

by_policies_that_weigh_costs = pytest.mark.parametrize("policy", [PrefixBalancer, KvAwareBalancer, LeastTokensBalancer])


def adapters(slots: int, charged: str, released: str = "") -> ReplicaAdapters:
    """After requests of adapters with these letters have come and ended, in this order."""
    state = ReplicaAdapters(slots)
    for name in charged:
        state = state.charge(name)
    for name in released:
        state = state.release(name)
    return state


@pytest.mark.parametrize(
    ("state", "cost"),
    [
        pytest.param(ReplicaAdapters(), 0, id="nothing is known of its slots"),
        pytest.param(adapters(2, ""), LOADS, id="nothing is loaded"),
        pytest.param(adapters(2, "x"), LOADS, id="a slot is free"),
        pytest.param(adapters(2, "ax", "ax"), 0, id="it is loaded"),
        pytest.param(adapters(2, "aaxx"), 0, id="it is in use"),
        pytest.param(adapters(2, "xy", "y"), MAKES_WAY, id="an idle one makes way"),
        pytest.param(adapters(2, "xyx", "xyx"), MAKES_WAY, id="one of two idle ones makes way"),
        pytest.param(adapters(2, "xy"), NO_SLOT, id="all slots are in use"),
        pytest.param(adapters(2, "xyz"), NO_SLOT, id="another one waits for a slot already"),
        pytest.param(adapters(2, "xya"), LOADS, id="it waits for a slot itself"),
        pytest.param(adapters(2, "xya", "x"), 0, id="it has got that slot"),
        pytest.param(adapters(2, "axy", "axy"), MAKES_WAY, id="it was evicted"),
        pytest.param(adapters(2, "axy", "xya"), 0, id="the least recently used one was evicted"),
    ],
)
def test_what_a_request_of_an_adapter_costs_if_there_are_more_than_slots(state: ReplicaAdapters, cost: float) -> None:
    assert adapter_costs("a", [state, adapters(2, "pq")])[0] == cost


@pytest.mark.parametrize(
    ("states", "costs"),
    [
        pytest.param([adapters(2, "x"), adapters(2, "")], [0, 0], id="as many as slots"),
        pytest.param([adapters(2, "x"), adapters(2, "x", "x")], [0, 0], id="the same one everywhere"),
        pytest.param([adapters(2, "a"), adapters(2, "x", "x"), adapters(2, "")], [0, 0, 0], id="it is one of them"),
        pytest.param([adapters(2, "x"), adapters(2, "y", "y")], [LOADS, LOADS], id="more than slots, one in each"),
        pytest.param([adapters(2, "x"), adapters(3, "y")], [LOADS, 0], id="more than the slots of one"),
    ],
)
def test_a_free_slot_costs_something_only_if_there_are_more_adapters_than_slots(
    states: list[ReplicaAdapters], costs: list[float]
) -> None:
    assert adapter_costs("a", states) == costs


@by_policies_that_weigh_costs
@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        pytest.param(ReplicaLoad(43, adapters=HAS_IT), ReplicaLoad(adapters=HAS_OTHERS), {0}, id="busier, and has it"),
        pytest.param(
            ReplicaLoad(1, 0, 6100, adapters=HAS_IT), ReplicaLoad(adapters=HAS_OTHERS), {1}, id="too much waits there"
        ),
        pytest.param(
            ReplicaLoad(1, kv_usage=0.85, adapters=HAS_IT),
            ReplicaLoad(adapters=HAS_OTHERS),
            {1},
            id="full memory",
        ),
        pytest.param(
            ReplicaLoad(1, 0, 4100, adapters=HAS_IT),
            ReplicaLoad(adapters=HAS_ROOM),
            {1},
            id="a free slot",
        ),
        pytest.param(ReplicaLoad(adapters=HAS_IT), ReplicaLoad(adapters=HAS_IT), {0, 1}, id="both have it"),
        pytest.param(ReplicaLoad(adapters=HAS_OTHERS), ReplicaLoad(adapters=HAS_OTHERS), {0, 1}, id="none has it"),
        pytest.param(
            ReplicaLoad(adapters=adapters(2, "xy")),
            ReplicaLoad(5, adapters=HAS_OTHERS),
            {1},
            id="one makes way",
        ),
    ],
)
def test_requests_go_where_their_adapter_is_unless_the_load_there_outweighs_it(
    policy: Any, first: ReplicaLoad, second: ReplicaLoad, chosen: set[int]
) -> None:
    balancer, replicas = policy(), with_loads(first, second)
    assert {balancer.select(TASK, replicas) for _ in range(40)} == chosen


@by_policies_that_weigh_costs
def test_requests_without_an_adapter_are_decided_by_load_alone(policy: Any) -> None:
    replicas = with_loads(ReplicaLoad(1, 0, 1, adapters=HAS_IT), ReplicaLoad(adapters=adapters(2, "xyz")))
    assert policy().select({"prompt": Prompt(range(100))}, replicas) == 1


@by_policies_that_weigh_costs
def test_in_a_large_fleet_the_replicas_that_have_the_adapter_are_compared(policy: Any) -> None:
    loads = [ReplicaLoad(1, adapters=HAS_OTHERS)] * 60 + [ReplicaLoad(n, adapters=HAS_IT) for n in (9, 5, 7, 3, 8)]
    balancer, replicas = policy(), with_loads(*loads)
    assert {balancer.select(TASK, replicas) for _ in range(50)} <= {60, 61, 62, 63, 64}


class CountedReplica:
    """Counts how often its load was looked at."""

    def __init__(self) -> None:
        self.queue_length = self.looked_at = 0

    @property
    def load(self) -> ReplicaLoad:
        self.looked_at += 1
        return ReplicaLoad(adapters=HAS_OTHERS)


def test_in_a_large_fleet_requests_gather_in_a_part_of_it_and_the_rest_is_not_searched() -> None:
    replicas = [CountedReplica() for _ in range(1024)]
    compared = [{*positions_to_compare(replicas, random.Random(seed), "a")} for seed in range(20)]
    assert len(set.intersection(*compared)) == 3
    assert sum(replica.looked_at > 0 for replica in replicas) == 64
