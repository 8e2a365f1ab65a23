"""A policy that knows the length of every answer and the cache of every engine, as a reference for real policies."""

import random
from collections.abc import Sequence

from simulator.replica import SimReplica
from simulator.requests import Request
from vllm_omni_plugin.balancing import Decision, Task
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.balancing.sampling import pick_lowest


class Omniscient:
    """Minimises the latency that a request adds to the sum of all latencies, without knowing later requests.

        prefill * (1 + requests there) + prefill waiting there + wait for KV memory
        + answer * iteration with one more sequence + sequence_s * (tokens that the others decode meanwhile)

    in seconds of the replica's engine. It is greedy, so it is a reference and not a strict bound.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        return self.decide(task, replicas).position

    def decide(self, task: Task, replicas: Sequence[SimReplica]) -> Decision:
        request: Request = task["engine_inputs"]
        prompt = task["prompt"]
        keys = prompt_keys(prompt, replicas[0].engine.settings.block_size)
        tokens, answer = len(prompt.token_ids), request.output_tokens - request.produced
        matches = [replica.matched_tokens(keys, tokens) for replica in replicas]
        added = [
            _added_seconds(replica, tokens - matched, answer)
            for replica, matched in zip(replicas, matches, strict=True)
        ]
        position = pick_lowest(added, self._rng)
        return Decision(position, "least-added-latency", matched_tokens=matches[position])


def _added_seconds(replica: SimReplica, uncached: int, answer: int) -> float:
    engine, settings = replica.engine, replica.engine.settings
    pending, left = 0, []
    for job, produced in replica.progress():
        left.append((job.output_tokens - produced, job.shared + job.reserved))
        if not produced:
            pending += job.prompt_tokens - max(job.computed, job.cached_tokens)
    iteration_s = settings.step_s + min(len(left) + 1, settings.max_num_seqs) * settings.sequence_s
    added = uncached * settings.prefill_token_s * (1 + len(left)) + pending * settings.prefill_token_s
    added += iteration_s * (answer + _iterations_until_room(replica, left, uncached + answer))
    added += settings.sequence_s * sum(min(answer, tokens) for tokens, _ in left)
    return added * engine.slowdown


def _iterations_until_room(replica: SimReplica, left: list[tuple[int, int]], tokens: int) -> int:
    """Iterations until enough answers have ended for the KV memory of this request and those that wait."""
    settings = replica.engine.settings
    needed = -(-tokens // settings.block_size) - replica.engine.cache.free
    needed += sum(-(-(job.prompt_tokens + job.output_tokens) // settings.block_size) for job in replica.unadmitted())
    if needed <= 0:
        return 0
    for iterations, blocks in sorted(left):
        needed -= blocks
        if needed <= 0:
            return iterations
    return max(iterations for iterations, _ in left) if left else 0
