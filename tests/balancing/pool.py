"""A minimal stage pool for policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.balancing import Decision, Prompt, ReplicaLoad, Task

BLOCK = 16


@dataclass(eq=False)
class PooledReplica:
    replica_id: int
    load: ReplicaLoad
    input_addr: str = ""
    output_addr: str = ""
    stage_id: int = 0

    def __post_init__(self) -> None:
        self.input_addr = self.input_addr or f"tcp://replica:{self.replica_id}"

    @property
    def queue_length(self) -> int:
        return self.load.requests

    def charge(self, requests: int, prefill_tokens: int = 0) -> None:
        load = self.load
        self.load = load._replace(
            requests=load.requests + requests, prefill_tokens=load.prefill_tokens + prefill_tokens
        )


@dataclass
class Pool:
    """Assigns tasks by the policy."""

    policy: Any
    replicas: tuple[PooledReplica, ...]
    assigned: list[PooledReplica] = field(default_factory=list)

    def send(self, task: Task, finish: bool = False) -> Decision:
        """Assign a request. It stays in flight in prefill unless `finish`."""
        decision: Decision = self.policy.decide(task, self.replicas)
        replica = self.replicas[decision.position]
        self.assigned.append(replica)
        if hasattr(self.policy, "assigned"):
            self.policy.assigned(task, replica, decision)
        if not finish:
            prompt = task.get("prompt")
            replica.charge(1, len(prompt.token_ids) - decision.matched_tokens if prompt else 0)
        return decision

    def compute(self) -> None:
        """Finish all prefills."""
        for replica in self.replicas:
            replica.charge(0, -replica.load.prefill_tokens)


def pool_of(policy: Any, count: int, **load: Any) -> Pool:
    start = ReplicaLoad(**{"kv_blocks": 1000, "block_size": BLOCK, **load})
    return Pool(policy, tuple(PooledReplica(number, start) for number in range(count)))


def prompt_task(token_ids: Sequence[int], **prompt: Any) -> Task:
    return {"prompt": Prompt(token_ids, **prompt)}
