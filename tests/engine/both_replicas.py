"""Asking a fleet until each of its replicas has answered."""

from collections.abc import Callable
from typing import TypeVar

from .server import ASSIGNMENTS, Server

MAX_SENDS = 40
"""Sends after which a replica that got nothing is being avoided; ties between idle replicas are drawn by lot."""

T = TypeVar("T")


def answers_of_both(fleet: Server, send: Callable[[], T]) -> list[T]:
    """What `send` returns, called until each replica has had a request."""
    before = assignments(fleet)
    answers = []
    for _ in range(MAX_SENDS):
        answers.append(send())
        now = assignments(fleet)
        if all(now[replica] > before[replica] for replica in before):
            return answers
    raise AssertionError(f"one replica got none of {MAX_SENDS} requests: {before} -> {assignments(fleet)}")


def assignments(fleet: Server) -> dict[str, float]:
    """Requests each replica that serves got so far. The counts of those that left stay."""
    present = fleet.by_replica("vllm_omni_fleet:replica_info")
    counts = fleet.by_replica(ASSIGNMENTS)
    return {replica: count for replica, count in counts.items() if present.get(replica)}
