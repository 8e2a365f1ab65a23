"""A policy that records the calls of its methods."""

from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.balancing import CacheChange, Candidate, Decision, ReplicaView, Task


class NotingPolicy:
    """Implements `DecidingBalancer` and `PolicyHooks`.

    Attributes:
        position: position of the replica that it chooses.
        notes: calls of the hooks, as (method, replica id, arguments).
        fault: raised by every hook, if set.
    """

    wants_cache_events = True

    def __init__(self, position: int = 0, matched_tokens: int = 0) -> None:
        self.position = position
        self.matched_tokens = matched_tokens
        self.tasks: list[Task] = []
        self.notes: list[tuple[Any, ...]] = []
        self.fault: BaseException | None = None

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        raise AssertionError("a policy that can decide is not asked to select")

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        self.tasks.append(task)
        position = self.position % len(replicas)
        candidates = (Candidate(position, 1.0, self.matched_tokens),)
        return Decision(position, "noted", candidates, matched_tokens=self.matched_tokens)

    def assigned(self, task: Task, replica: Any, decision: Decision) -> None:
        self._note("assigned", replica, task["request_id"], decision.reason)

    def began(self, task: Task, replica: Any, cached_tokens: int | None) -> None:
        self._note("began", replica, task["request_id"], cached_tokens)

    def assignment_cancelled(self, task: Task, replica: Any, decision: Decision) -> None:
        self._note("assignment_cancelled", replica, task["request_id"], decision.reason)

    def ended(self, task: Task, replica: Any, seconds: float, output_tokens: int) -> None:
        self._note("ended", replica, task["request_id"], seconds, output_tokens, list(task["answer_ids"]))

    def replica_lost(self, replica: Any) -> None:
        self._note("replica_lost", replica)

    def cache_cleared(self, replica: Any) -> None:
        self._note("cache_cleared", replica)

    def cache_changed(self, replica: Any, change: CacheChange) -> None:
        self._note("cache_changed", replica, change)

    def _note(self, what: str, replica: Any, *more: object) -> None:
        self.notes.append((what, replica.replica_id, *more))
        if self.fault is not None:
            raise self.fault
