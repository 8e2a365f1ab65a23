"""The policy `session`."""

import random
from typing import Any

import pytest

from vllm_omni_plugin.balancing import SessionBalancer

from .fakes import with_queues
from .pool import PooledReplica, pool_of

SESSIONS = [f"session-{number}" for number in range(10_000)]


def policy(**options: Any) -> SessionBalancer:
    return SessionBalancer(rng=random.Random(0), **options)


def home(balancer: SessionBalancer, replicas: Any, session: str) -> str:
    return str(replicas[balancer.select({"session": session}, replicas)].input_addr)


def homes(balancer: SessionBalancer, replicas: tuple[PooledReplica, ...]) -> list[int]:
    return [replicas[balancer.select({"session": session}, replicas)].replica_id for session in SESSIONS]


def test_a_session_stays_and_sessions_differ() -> None:
    balancer, pool = policy(), pool_of(None, 8)
    for session in SESSIONS[:50]:
        decisions = {balancer.decide({"session": session}, pool.replicas) for _ in range(3)}
        assert [decision.reason for decision in decisions] == ["session"]
    assert len({home(balancer, pool.replicas, session) for session in SESSIONS[:50]}) == 8


@pytest.mark.parametrize("task", [{}, {"session": None}, {"session": ""}])
def test_without_a_session_the_shortest_queue_wins(task: Any) -> None:
    decision = policy().decide(task, with_queues(2, 1, 3))
    assert (decision.position, decision.reason, decision.fallback) == (1, "least-load", "no-session")


def test_a_session_spills_at_the_bound_and_not_before() -> None:
    balancer, pool = policy(load_factor=1.5, slack=2), pool_of(None, 4)
    at = balancer.select({"session": "s"}, pool.replicas)
    # With n requests, all on one replica, the bound is 1.5 * (n + 1) / 4 + 2: 3.875 for four of them, 3.5 for three.
    pool.replicas[at].charge(3)
    decision = balancer.decide({"session": "s"}, pool.replicas)
    assert (decision.position, decision.reason) == (at, "session")
    pool.replicas[at].charge(1)
    decision = balancer.decide({"session": "s"}, pool.replicas)
    assert decision.position != at
    assert decision.reason == "session-spilled"
    assert decision.candidates[-1].score == 0
    assert {balancer.select({"session": "s"}, pool.replicas) for _ in range(10)} == {decision.position}


def test_a_restart_moves_nothing() -> None:
    balancer, replicas = policy(), pool_of(None, 8).replicas
    before = homes(balancer, replicas)
    restarted = PooledReplica(4, replicas[4].load, "tcp://elsewhere:1")
    assert homes(balancer, (*replicas[:4], restarted, *replicas[5:])) == before


def test_replicas_without_an_id_are_identified_by_address() -> None:
    replicas = with_queues(0, 0, 0, 0)
    balancer = policy()
    before = [home(balancer, replicas, session) for session in SESSIONS[:100]]
    replicas.reverse()
    assert [home(balancer, replicas, session) for session in SESSIONS[:100]] == before
