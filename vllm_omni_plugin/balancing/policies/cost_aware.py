"""The least work ahead, in seconds that are corrected by what requests really took."""

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
from vllm_omni_plugin.balancing.loads.replica_load import load_of
from vllm_omni_plugin.balancing.policy_options import number
from vllm_omni_plugin.balancing.sampling import expected_arrivals, pick_lowest, positions_to_compare

_HALF_LIFE = 16
"""Requests per replica after which what was observed counts half. Counted over the fleet: a replica that gets none for
its slowness is taken for an ordinary one again, by and by, and so is tried again."""

_PRIOR_REQUESTS = 4
"""Requests that must have been observed on a replica to count as much as what is usual in the fleet."""

_FIRST_GUESS = 256.0
"""Tokens of an answer before any was seen; counts as one that was."""

_WINDOW = 100
"""Answers after which the mean becomes an exponentially decayed one, so that it follows a changing workload."""


class _OutputLengths:
    """Mean length of the answers seen, apart for each order of magnitude (to base 2) of what a request allowed.

    Who asks for 16 tokens gets other answers than who allows 4,000, and one mean of both would suit neither. Memory is
    bounded: there are as many means as bits in a limit.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}

    def expected(self, max_tokens: int | None) -> float:
        """Tokens that an answer will probably have, if it may have `max_tokens` (None: no limit)."""
        mean, _ = self._means.get(_magnitude(max_tokens), (_FIRST_GUESS, 1))
        return mean if max_tokens is None else min(mean, max_tokens)

    def saw(self, max_tokens: int | None, tokens: int) -> None:
        """An answer that might have had `max_tokens` had `tokens`."""
        magnitude = _magnitude(max_tokens)
        mean, count = self._means.get(magnitude, (_FIRST_GUESS, 1))
        count = min(count + 1, _WINDOW)
        self._means[magnitude] = mean + (tokens - mean) / count, count


@dataclass(slots=True)
class _DecayedRatio:
    """Sums of observed and estimated seconds, halved every so often. "Now" may be on any scale that does not go back.

    The ratio of the sums and not the mean of ratios: a short request's ratio says little and would count as much.
    """

    observed: float = 0.0
    estimated: float = 0.0
    as_of: float = 0.0

    def add(self, observed: float, estimated: float, now: float, half_life: float) -> None:
        """One more observation, after letting the older ones decay to `now`."""
        weight = 0.5 ** ((now - self.as_of) / half_life)
        self.observed = self.observed * weight + observed
        self.estimated = self.estimated * weight + estimated
        self.as_of = now

    def value(self, now: float, half_life: float, prior: float, prior_weight: float) -> float:
        """The ratio at `now`, drawn towards `prior` as if `prior_weight` estimated seconds had had that ratio."""
        weight: float = 0.5 ** ((now - self.as_of) / half_life)
        return (self.observed * weight + prior * prior_weight) / (self.estimated * weight + prior_weight)


@dataclass(slots=True)
class _Cost:
    """Estimated seconds of one request: of its prompt, what of that is still ahead, and of its answer."""

    prompt: float
    prompt_ahead: float
    output: float
    began: bool = False


@dataclass(slots=True)
class _Account:
    """What this policy knows of a replica; `ahead` is the sum over `costs`, kept so that nothing is summed per pick."""

    ahead: float = 0.0
    costs: dict[str, _Cost] = field(default_factory=dict)
    speed: _DecayedRatio = field(default_factory=_DecayedRatio)


class CostAwareBalancer(DecidingBalancer):
    """Sends a request where the work ahead of it and its own take the fewest seconds.

        cost  = prompt_token_s * uncached prompt tokens + output_token_s * expected output tokens
        score = (costs of the requests there + cost) * correction

    The expected output is the mean of the answers seen whose `max_tokens` had the same magnitude, at most `max_tokens`.
    The prompt's part of a cost is over at the first output; how much of the prompt was cached is known by then.
    `correction` is observed / estimated seconds of the requests that ended on the replica, the estimate being made with
    the tokens they really had. What was observed counts half after 16 more requests per replica, and the ratio is drawn
    towards the fleet's with the weight of four requests like this one. Requests of other heads count as this one. Up to
    eight replicas are all compared; of more, see `positions_to_compare`. A lost replica is forgotten.

    Source: least work left (Harchol-Balter, "Performance Modeling and Design of Computer Systems", 2013, ch. 24) with
    sizes estimated; the correction is ours. The reason is `least-cost`, the fallback `no-history` as long as no request
    has ended.

    Args:
        prompt_token_s: seconds for a prompt token that is not cached; 0.000001 to 10.
        output_token_s: seconds for a token of the answer; 0.000001 to 10.
        rng: source of randomness; a freshly seeded one of its own by default.

    Raises:
        ConfigError: an option is out of range.
    """

    binds_late = True

    def __init__(
        self, *, prompt_token_s: float = 0.0001, output_token_s: float = 0.0002, rng: random.Random | None = None
    ) -> None:
        self._prompt_token_s = number("prompt_token_s", prompt_token_s, 1e-6, 10)
        self._output_token_s = number("output_token_s", output_token_s, 1e-6, 10)
        self._rng = rng or random.Random()
        self._lengths = _OutputLengths()
        self._accounts: dict[str, _Account] = {}
        self._fleet_speed = _DecayedRatio()
        self._ended = 0

    def __repr__(self) -> str:
        costs = sum(len(account.costs) for account in self._accounts.values())
        return f"<CostAwareBalancer [{len(self._accounts)} replicas, {costs} requests]>"

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Compare the corrected seconds. Raises ValueError when `replicas` is empty."""
        require_replicas(replicas)
        prompt, output = self._estimate(task)
        positions = positions_to_compare(replicas, self._rng)
        scores = self._scores(replicas, positions, prompt + output)
        coming = expected_arrivals(replicas, len(positions)) * (prompt + output)
        position = positions[pick_lowest(scores, self._rng, coming)]
        fallback = "" if self._ended else "no-history"
        return Decision(position, "least-cost", tuple(map(Candidate, positions, scores)), fallback)

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """Charge a request's cost to the replica it goes to."""
        if "request_id" in task:
            account = self._accounts.setdefault(replica.input_addr, _Account())
            prompt, output = self._estimate(task)
            account.costs[task["request_id"]] = _Cost(prompt, prompt, output)
            account.ahead += prompt + output

    def began(self, task: Task, replica: ReplicaView, cached_tokens: int | None) -> None:
        """Its prompt is computed, and cost as much as was not cached."""
        account = self._accounts.get(replica.input_addr)
        cost = account.costs.get(task.get("request_id", "")) if account else None
        if account and cost:
            account.ahead -= cost.prompt_ahead
            cost.prompt = self._prompt_token_s * max(prompt_tokens(task) - (cached_tokens or 0), 1)
            cost.prompt_ahead, cost.began = 0.0, True

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """Release a request's cost, and learn from it if it had its first output."""
        account = self._accounts.get(replica.input_addr)
        cost = account.costs.pop(task.get("request_id", ""), None) if account else None
        if not account or not cost:
            return
        # Exactly zero when nothing is left, or rounding errors would add up for ever.
        account.ahead = account.ahead - cost.prompt_ahead - cost.output if account.costs else 0.0
        if cost.began:
            self._learn(account, seconds, cost.prompt + self._output_token_s * output_tokens)
            self._lengths.saw(task.get("max_tokens"), output_tokens)

    def replica_lost(self, replica: ReplicaView) -> None:
        """Forget the replica and what was charged to it."""
        self._accounts.pop(replica.input_addr, None)

    def _estimate(self, task: Task) -> tuple[float, float]:
        """Seconds of the prompt and of the answer."""
        expected = self._lengths.expected(task.get("max_tokens"))
        return self._prompt_token_s * prompt_tokens(task), self._output_token_s * expected

    def _learn(self, account: _Account, observed: float, estimated: float) -> None:
        self._ended += 1
        for speed in (account.speed, self._fleet_speed):
            speed.add(observed, estimated, self._ended, self._half_life)

    @property
    def _half_life(self) -> float:
        return _HALF_LIFE * max(len(self._accounts), 1)

    def _scores(self, replicas: Sequence[ReplicaView], positions: Sequence[int], cost: float) -> list[float]:
        now, half_life, prior_weight = self._ended, self._half_life, _PRIOR_REQUESTS * cost
        usual = self._fleet_speed.value(now, half_life, 1.0, prior_weight)
        scores = []
        for position in positions:
            replica = replicas[position]
            account = self._accounts.get(replica.input_addr)
            ahead = cost * (1 + load_of(replica).others)
            if account is None:
                scores.append(ahead * usual)
            else:
                scores.append((ahead + account.ahead) * account.speed.value(now, half_life, usual, prior_weight))
        return scores


def _magnitude(max_tokens: int | None) -> int:
    return 0 if max_tokens is None else max_tokens.bit_length()
