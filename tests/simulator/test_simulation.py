"""Whole runs: nothing is lost or counted twice, and the same seed gives the same run."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulator.contenders import OMNISCIENT, PEERS, build
from simulator.head import Policy
from simulator.metrics import Metrics, Summary
from simulator.profiles import accelerator
from simulator.replica import SimReplica
from simulator.requests import Request, Session
from simulator.simulation import DETECTION_S, LINK_S, MOVES, WAIT_S, Simulation
from simulator.traffic import Requests, tokens
from simulator.workload import Incident, Scale, Workload
from simulator.workloads import WORKLOADS

from vllm_omni_plugin.balancing import CacheChange, Decision, LoadBalancingPolicy, Task, known_policies

SETTINGS = accelerator()
REPLICAS = 4
OURS = [name for name in map(str, LoadBalancingPolicy) if name in known_policies()]


def scale(requests: int = 80, seed: int = 0) -> Scale:
    return Scale(REPLICAS, requests, SETTINGS, seed)


def run(workload: Workload, policy: Policy, replicas: int = REPLICAS) -> Metrics:
    return Simulation(workload, policy, SETTINGS, replicas).run()


def summary(workload: str, policy: str, seed: int = 0, requests: int = 80) -> Summary:
    return run(WORKLOADS[workload](scale(requests, seed)), build(policy, seed)).summary()


def at_once(count: int, output_tokens: int = 50) -> list[Session]:
    rng = random.Random(0)
    requests = Requests(rng)
    return [Session(0.0, [requests.make(tokens(rng, 100), output_tokens, output_tokens)]) for _ in range(count)]


class First:
    """Takes the first replica, and records its hook calls."""

    wants_cache_events = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stored: dict[int, set[int]] = defaultdict(set)

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        return 0

    def dispatched(self, task: Task, replica: SimReplica, decision: Decision) -> None:
        self.calls.append(f"dispatched {task['request_id']} to {replica.replica_id}")

    def began(self, task: Task, replica: SimReplica, cached_tokens: int | None) -> None:
        self.calls.append(f"began {task['request_id']}")

    def ended(self, task: Task, replica: SimReplica, seconds: float, output_tokens: int) -> None:
        self.calls.append(f"ended {task['request_id']} with {output_tokens}")

    def replica_lost(self, replica: SimReplica) -> None:
        self.calls.append(f"replica_lost {replica.replica_id}")
        self.stored.pop(replica.replica_id)

    def cache_changed(self, replica: SimReplica, change: CacheChange) -> None:
        stored = self.stored[replica.replica_id]
        assert stored.isdisjoint(change.stored)
        assert stored.issuperset(change.removed)
        stored.difference_update(change.removed)
        stored.update(change.stored)


@pytest.mark.parametrize("policy", [*OURS, *PEERS])
@pytest.mark.parametrize("workload", ["multi-turn", "churn"])
def test_every_request_ends_once_under_every_policy(workload: str, policy: str) -> None:
    made = WORKLOADS[workload](scale())
    sessions = list(made.sessions)
    ends: Counter[Request] = Counter()
    simulation = Simulation(Workload(sessions, made.incidents), build(policy, 0), SETTINGS, REPLICAS)
    answered = simulation.metrics.answered
    simulation.metrics.answered = lambda request: (ends.update([request]), answered(request))[1]  # type: ignore[method-assign]
    metrics = simulation.run()
    assert metrics.refused == 0
    assert ends == Counter(request for session in sessions for request in session.turns)
    assert all(request.arrived <= request.first_token <= request.finished for request in ends)  # type: ignore[operator]


@pytest.mark.parametrize("policy", [*OURS, *PEERS])
def test_the_same_seed_gives_the_same_run_and_another_seed_another_run(policy: str) -> None:
    first = summary("churn", policy, seed=3)
    assert first == summary("churn", policy, seed=3)
    assert first != summary("churn", policy, seed=4)


@pytest.mark.parametrize("workload", sorted(set(WORKLOADS) - {"week"}))
def test_the_omniscient_policy_is_never_worse_than_random_on_average(workload: str) -> None:
    best, chance = summary(workload, OMNISCIENT, requests=200), summary(workload, "random", requests=200)
    assert best.mean_latency <= chance.mean_latency


def test_a_policy_gets_the_hook_calls_of_a_pool() -> None:
    policy = First()
    run(Workload(at_once(1)), policy, replicas=1)
    assert policy.calls == ["dispatched 1-0 to 0", "began 1-0", "ended 1-0 with 50"]
    # The last token is never computed on, so 149 tokens fill nine blocks.
    assert len(policy.stored[0]) == 9


def test_a_request_whose_replica_dies_continues_on_another_one() -> None:
    policy = First()
    sessions = at_once(1, output_tokens=100)
    request = sessions[0].turns[0]
    metrics = run(Workload(sessions, [Incident(0.5, "die", 0, until=50.0)]), policy, replicas=2)
    # 1 ms on the way, 20 ms of prefill, then a token every 10.1 ms until 0.5 s.
    produced = 1 + int((0.5 - LINK_S - 0.020) / 0.0101)
    assert policy.calls == [
        "dispatched 1-0 to 0",
        "began 1-0",
        "replica_lost 0",
        "dispatched 1-1 to 1",
        "began 1-1",
        f"ended 1-1 with {100 - produced}",
    ]
    assert request.first_token == pytest.approx(0.020 + 2 * LINK_S)
    assert metrics.refused == 0
    assert metrics.latencies[0] > 100 * 0.0101 + DETECTION_S


def test_a_request_that_loses_its_replica_too_often_is_refused() -> None:
    deaths = [Incident(0.3 * number + 0.2, "die", number, until=100.0) for number in range(MOVES + 1)]
    metrics = run(Workload([*at_once(1, output_tokens=400)], deaths), First(), replicas=MOVES + 2)
    assert (metrics.refused, len(metrics.latencies)) == (1, 0)


def test_requests_without_a_replica_wait_and_are_refused_after_the_time_limit() -> None:
    sessions = at_once(2)
    sessions[1].starts = WAIT_S - 10.0
    metrics = run(Workload(sessions, [Incident(0.0, "leave", 0, until=WAIT_S + 10.0)]), First(), replicas=1)
    assert metrics.refused == 1
    assert metrics.latencies[0] > 20.0


def test_a_replica_that_leaves_finishes_its_work_and_comes_back_without_a_cache() -> None:
    policy = First()
    sessions = at_once(2)
    sessions[1].starts = 20.0
    run(Workload(sessions, [Incident(0.1, "leave", 0, until=10.0)]), policy, replicas=1)
    assert policy.calls[:4] == ["dispatched 1-0 to 0", "began 1-0", "ended 1-0 with 50", "replica_lost 0"]


def test_a_slow_replica_takes_longer_by_its_factor() -> None:
    usual = run(Workload(at_once(1)), First(), replicas=1).latencies[0]
    slow = run(Workload(at_once(1), [Incident(0.0, "slow", 0, factor=3.0)]), First(), replicas=1).latencies[0]
    assert slow - 2 * LINK_S == pytest.approx(3 * (usual - 2 * LINK_S))


def test_a_turn_comes_after_its_pause_and_finds_the_previous_turn_cached() -> None:
    rng = random.Random(0)
    requests = Requests(rng)
    first = requests.make(tokens(rng, 100), 60, 60)
    second = requests.make(first.tokens + tokens(rng, 20), 5, 5)
    run(Workload([Session(1.0, [first, second], [2.5, 0.0])]), First(), replicas=1)
    assert first.finished is not None
    assert second.arrived == first.finished + 2.5
    assert second.cached_tokens == 159 // SETTINGS.block_size * SETTINGS.block_size


def test_evicted_blocks_are_reported_as_removed() -> None:
    policy = First()
    settings = replace(SETTINGS, kv_blocks=20, max_model_len=320)
    sessions = at_once(4)
    for number, session in enumerate(sessions):
        session.starts = 10.0 * number
    Simulation(Workload(sessions), policy, settings, 1).run()
    assert 9 < len(policy.stored[0]) <= 20
