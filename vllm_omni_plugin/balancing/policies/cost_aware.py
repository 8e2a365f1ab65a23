"""Chooses the least work ahead, in estimated seconds that are corrected by measured ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_omni_plugin.balancing.interface import (
    Candidate,
    DecidingBalancer,
    Decision,
    ReplicaView,
    Task,
    prompt_tokens,
    require_replicas,
)
from vllm_omni_plugin.balancing.loads.context_cost import context_cost
from vllm_omni_plugin.balancing.loads.replica_load import load_of
from vllm_omni_plugin.balancing.policy_options import number
from vllm_omni_plugin.balancing.sampling import expected_arrivals, pick_lowest, positions_to_compare

_HALF_LIFE = 16
"""Requests per replica after which an observation counts half. They are counted over the whole fleet, so that a slow
replica without requests counts as an ordinary one after some time and is tried again."""

_PRIOR_REQUESTS = 4
"""Weight of the fleet's ratio in a replica's ratio, in requests."""

_FIRST_GUESS = 256.0
"""Assumed length of an answer, in tokens; counts as one observed answer."""

_WINDOW = 100
"""After this number of answers the mean decays exponentially, so that it follows a changing workload."""


class _OutputLengths:
    """Mean length of the answers, separately for each power of two of `max_tokens`, so that memory is bounded."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}

    def expected(self, max_tokens: int | None) -> float:
        """Expected tokens of an answer; `max_tokens` None means no limit."""
        mean, _ = self._means.get(_magnitude(max_tokens), (_FIRST_GUESS, 1))
        return mean if max_tokens is None else min(mean, max_tokens)

    def add(self, max_tokens: int | None, tokens: int) -> None:
        magnitude = _magnitude(max_tokens)
        mean, count = self._means.get(magnitude, (_FIRST_GUESS, 1))
        count = min(count + 1, _WINDOW)
        self._means[magnitude] = mean + (tokens - mean) / count, count


@dataclass(slots=True)
class _DecayedRatio:
    """Ratio of the decayed sums of observed and estimated seconds; a mean of ratios would overweight short requests."""

    observed: float = 0.0
    estimated: float = 0.0
    as_of: float = 0.0

    def add(self, observed: float, estimated: float, now: float, half_life: float) -> None:
        weight = 0.5 ** ((now - self.as_of) / half_life)
        self.observed = self.observed * weight + observed
        self.estimated = self.estimated * weight + estimated
        self.as_of = now

    def value(self, now: float, half_life: float, prior: float, prior_weight: float) -> float:
        """The ratio at `now`, as if `prior_weight` further estimated seconds had had the ratio `prior`."""
        weight: float = 0.5 ** ((now - self.as_of) / half_life)
        return (self.observed * weight + prior * prior_weight) / (self.estimated * weight + prior_weight)


@dataclass(slots=True)
class _Cost:
    """Estimated seconds of one request: prompt, the part of the prompt still to be computed, and answer."""

    prompt: float
    prompt_ahead: float
    output: float
    began: bool = False


@dataclass(slots=True)
class _ReplicaCosts:
    """The requests of one replica. `ahead` is the sum of `costs`, so that a decision need not add them up."""

    ahead: float = 0.0
    costs: dict[str, _Cost] = field(default_factory=dict)
    speed: _DecayedRatio = field(default_factory=_DecayedRatio)


class CostAwareBalancer(DecidingBalancer):
    """Sends a request to the replica where the work ahead, including its own, takes the fewest seconds.

        cost  = prompt_token_s * uncached prompt tokens + output_token_s * expected output tokens
        score = (costs of the requests there + cost + prompt_token_s * context_cost) * correction

    The expected output is the mean of the answers to requests with a `max_tokens` of the same magnitude, at most
    `max_tokens`. The prompt's cost is released at the first output. `correction` is the decayed ratio of observed to
    estimated seconds of the requests that ended on the replica, mixed with the fleet's ratio. A request of another head
    counts like this one.

    Source: least work left (Harchol-Balter, "Performance Modeling and Design of Computer Systems", 2013, ch. 24); the
    correction is ours, and for decode work and KV memory see `context_cost`. The reason is `least-cost`, the fallback
    `no-history`. docs/policies.md has the options.
    """

    binds_late = True

    def __init__(
        self, *, prompt_token_s: float = 0.0001, output_token_s: float = 0.0002, rng: random.Random | None = None
    ) -> None:
        self._prompt_token_s = number("prompt_token_s", prompt_token_s, 1e-6, 10)
        self._output_token_s = number("output_token_s", output_token_s, 1e-6, 10)
        self._rng = rng or random.Random()
        self._lengths = _OutputLengths()
        self._replicas: dict[str, _ReplicaCosts] = {}
        self._fleet_speed = _DecayedRatio()
        self._ended = 0

    def __repr__(self) -> str:
        costs = sum(len(entry.costs) for entry in self._replicas.values())
        return f"<CostAwareBalancer [{len(self._replicas)} replicas, {costs} requests]>"

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        require_replicas(replicas)
        prompt, output = self._estimate(task)
        positions = positions_to_compare(replicas, self._rng)
        scores = self._scores(replicas, positions, prompt + output)
        arrivals = expected_arrivals(replicas, len(positions)) * (prompt + output)
        position = positions[pick_lowest(scores, self._rng, arrivals)]
        fallback = "" if self._ended else "no-history"
        return Decision(position, "least-cost", tuple(map(Candidate, positions, scores)), fallback)

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        if "request_id" in task:
            entry = self._replicas.setdefault(replica.input_addr, _ReplicaCosts())
            prompt, output = self._estimate(task)
            entry.costs[task["request_id"]] = _Cost(prompt, prompt, output)
            entry.ahead += prompt + output

    def began(self, task: Task, replica: ReplicaView, cached_tokens: int | None) -> None:
        entry = self._replicas.get(replica.input_addr)
        cost = entry.costs.get(task.get("request_id", "")) if entry else None
        if entry and cost:
            entry.ahead -= cost.prompt_ahead
            cost.prompt = self._prompt_token_s * max(prompt_tokens(task) - (cached_tokens or 0), 1)
            cost.prompt_ahead, cost.began = 0.0, True

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        entry = self._replicas.get(replica.input_addr)
        cost = entry.costs.pop(task.get("request_id", ""), None) if entry else None
        if not entry or not cost:
            return
        # Exactly zero if nothing is left, or rounding errors would add up.
        entry.ahead = entry.ahead - cost.prompt_ahead - cost.output if entry.costs else 0.0
        if cost.began:
            self._learn(entry, seconds, cost.prompt + self._output_token_s * output_tokens)
            self._lengths.add(task.get("max_tokens"), output_tokens)

    def replica_lost(self, replica: ReplicaView) -> None:
        self._replicas.pop(replica.input_addr, None)

    def _estimate(self, task: Task) -> tuple[float, float]:
        """Seconds of the prompt and of the answer."""
        expected = self._lengths.expected(task.get("max_tokens"))
        return self._prompt_token_s * prompt_tokens(task), self._output_token_s * expected

    def _learn(self, entry: _ReplicaCosts, observed: float, estimated: float) -> None:
        self._ended += 1
        for speed in (entry.speed, self._fleet_speed):
            speed.add(observed, estimated, self._ended, self._half_life)

    @property
    def _half_life(self) -> float:
        return _HALF_LIFE * max(len(self._replicas), 1)

    def _scores(self, replicas: Sequence[ReplicaView], positions: Sequence[int], cost: float) -> list[float]:
        now, half_life, prior_weight = self._ended, self._half_life, _PRIOR_REQUESTS * cost
        usual = self._fleet_speed.value(now, half_life, 1.0, prior_weight)
        scores = []
        for position in positions:
            replica = replicas[position]
            entry = self._replicas.get(replica.input_addr)
            load = load_of(replica)
            ahead = cost * (1 + load.others) + self._prompt_token_s * context_cost(load)
            if entry is None:
                scores.append(ahead * usual)
            else:
                scores.append((ahead + entry.ahead) * entry.speed.value(now, half_life, usual, prior_weight))
        return scores


def _magnitude(max_tokens: int | None) -> int:
    return 0 if max_tokens is None else max_tokens.bit_length()
