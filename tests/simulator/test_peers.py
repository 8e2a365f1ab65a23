"""The rules of other load balancers, on hand-made fleets."""

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from simulator.peers import LMetric, PlainRoundRobin, SglangCacheAware, StaleLeastQueue, VllmDataParallel

from vllm_omni_plugin.balancing import Decision, Prompt, Task
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport

BLOCK = EngineSettings().block_size
QUIET = LoadReport(0, 0, 0.0)


@dataclass
class FakeEngine:
    settings: EngineSettings = field(default_factory=EngineSettings)


@dataclass
class FakeReplica:
    """A replica with values of the test."""

    replica_id: int
    queue_length: int = 0
    current: LoadReport = QUIET
    matched: int = 0
    engine: FakeEngine = field(default_factory=FakeEngine)

    def report(self) -> LoadReport:
        return self.current

    def matched_tokens(self, keys: list[int], prompt_tokens: int) -> int:
        return self.matched


def fleet(*queues: int) -> Any:
    return tuple(FakeReplica(number, queue) for number, queue in enumerate(queues))


def task(tokens: int = 100, first: int = 0) -> Task:
    return Task(prompt=Prompt(array("I", range(first, first + tokens))))


def rng() -> random.Random:
    return random.Random(0)


def test_round_robin_counts() -> None:
    policy, replicas = PlainRoundRobin(rng()), fleet(9, 0, 0)
    assert [policy.select({}, replicas) for _ in range(4)] == [1, 2, 0, 1]


def test_the_stale_queue_is_that_of_the_last_heartbeat() -> None:
    policy, replicas = StaleLeastQueue(rng()), fleet(3, 1, 2)
    policy.tick(replicas)
    replicas[1].queue_length = 100
    assert {policy.select({}, replicas) for _ in range(100)} == {1}
    policy.tick(replicas)
    assert policy.select({}, replicas) == 2


@pytest.mark.parametrize(
    ("reports", "in_flight", "chosen"),
    [
        pytest.param([(0, 5, 0.1), (0, 4, 0.1)], [0, 0], 1, id="fewest in the report"),
        pytest.param([(0, 5, 0.1), (0, 4, 0.1)], [0, 6], 0, id="own count above the report"),
        pytest.param([(0, 5, 0.9), (4, 0, 0.4)], [0, 0], 1, id="no penalty for KV usage up to a half"),
        pytest.param([(0, 9, 0.9), (4, 0, 0.9)], [0, 0], 0, id="4 + 4 * 6 * 0.4 is more than 9"),
        pytest.param([(0, 3, 0.1), (0, 3, 0.1)], [0, 0], 0, id="tie to the first"),
    ],
)
def test_vllm_scores_by_the_larger_count_and_the_pressure(
    reports: list[tuple[int, int, float]], in_flight: list[int], chosen: int
) -> None:
    policy, replicas = VllmDataParallel(rng()), fleet(*in_flight)
    for replica, report in zip(replicas, reports, strict=True):
        replica.current = LoadReport(*report)
    policy.tick(replicas)
    assert policy.select({}, replicas) == chosen


def test_vllm_moves_on_from_tie_to_tie_between_pushes() -> None:
    policy, replicas = VllmDataParallel(rng()), fleet(0, 0, 0)
    policy.tick(replicas)
    assert [policy.select({}, replicas) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("matched", "queues", "chosen"),
    [
        pytest.param([0, 80], [0, 3], 1, id="20 * 4 is less than 100 * 1"),
        pytest.param([0, 80], [0, 5], 0, id="20 * 6 is more than 100 * 1"),
        pytest.param([0, 0], [2, 1], 1, id="load alone"),
    ],
)
def test_lmetric_takes_the_smallest_product(matched: list[int], queues: list[int], chosen: int) -> None:
    replicas = fleet(*queues)
    for replica, tokens in zip(replicas, matched, strict=True):
        replica.matched = tokens
    assert LMetric(rng()).decide(task(100), replicas) == Decision(
        chosen, "lowest-product", matched_tokens=matched[chosen]
    )


@pytest.mark.parametrize(
    ("shared_blocks", "queues", "chosen"),
    [
        pytest.param(4, [5, 0], 0, id="40% matched"),
        pytest.param(3, [5, 0], 1, id="30% matched is not over 30%"),
        pytest.param(4, [64, 0], 0, id="a difference of 64 is no imbalance"),
        pytest.param(4, [65, 0], 1, id="a difference of 65 is"),
        pytest.param(4, [200, 134], 0, id="unless it is below one half"),
    ],
)
def test_sglang_follows_the_match_unless_loads_are_imbalanced(
    shared_blocks: int, queues: list[int], chosen: int
) -> None:
    policy, replicas = SglangCacheAware(rng()), fleet(*queues)
    before = array("I", range(shared_blocks * BLOCK)) + array("I", range(10_000, 10_100))
    policy.dispatched(Task(prompt=Prompt(before)), replicas[0], Decision(0, ""))
    assert policy.select(task(10 * BLOCK), replicas) == chosen


def test_sglang_forgets_a_lost_replica() -> None:
    policy, replicas = SglangCacheAware(rng()), fleet(5, 0)
    policy.dispatched(task(10 * BLOCK), replicas[0], Decision(0, ""))
    policy.replica_lost(replicas[0])
    assert policy.select(task(10 * BLOCK), replicas) == 1
