"""Where a prompt's beginning is cached, weighed against the work that waits there."""

import math
import random
from collections.abc import Mapping, Sequence

from vllm_omni_plugin.balancing.caches.block_index import Level
from vllm_omni_plugin.balancing.caches.block_keys import answered_keys, prompt_keys
from vllm_omni_plugin.balancing.caches.prefix_caches import PrefixCaches
from vllm_omni_plugin.balancing.caches.rendezvous import ExpectedPrefix, RendezvousTable, expected_prefix
from vllm_omni_plugin.balancing.caches.replica_bits import (
    FleetBits,
    ReplicaBits,
    block_size_of,
    capacity_of,
    mask_of,
    sample_bits,
)
from vllm_omni_plugin.balancing.interface import (
    NO_PROMPT,
    CacheChange,
    Candidate,
    DecidingBalancer,
    Decision,
    Prompt,
    ReplicaView,
    Task,
    require_replicas,
)
from vllm_omni_plugin.balancing.loads.replica_load import load_of
from vllm_omni_plugin.balancing.loads.serving_replicas import ServingReplicas
from vllm_omni_plugin.balancing.policy_options import number
from vllm_omni_plugin.balancing.sampling import (
    MOST_COMPARED,
    expected_arrivals,
    has_other_heads,
    pick_lowest,
    positions_to_compare,
)

_MOST_HOLDERS = 3
"""Replicas compared in a large fleet because they have the longest matches."""
_MOST_DELAYED = 4
"""Requests that a token to compute is charged for at most: a cold replica is worth warming while it is idle, and not
for ever too expensive once it is busy. Chosen with benchmarks/simulate.py; 2 and 8 were worse, no bound was worst."""

_ByPosition = Sequence[int] | Mapping[int, int]


class PrefixBalancer(DecidingBalancer):
    """Sends a prompt where most of it is cached, unless the work that waits there outweighs the saving.

    The lowest `overlap_weight * (prompt - matched) * min(4, requests + 1) + prefill_tokens + answer_tokens * requests`
    wins, the latency that the choice adds to all requests, in prompt tokens: what it computes delays everybody on the
    replica, what waits there delays it alone, and its answer and those of the others delay each other. No thresholds,
    hence nothing that is noise at low load. A replica with an empty cache and nothing to do gets a prompt that is
    cached elsewhere once all who have it have `prompt / answer_tokens` requests. Equal scores go to the longest match,
    then at random.

    Source: LMetric, `(prompt - matched) * (load + 1)`, with a price of answers, without which a prompt that is cached
    as a whole would cost nothing and draw any number of its like to one replica; and the prefill that waits, as in
    Dynamo's cost. It is added and not multiplied, or the one replica that is just computing a context would be
    avoided by all who need it, and each of them would compute it elsewhere. The weight and the temperature are those of
    NVIDIA Dynamo's KV router. What a replica has cached is known from its engine's KV cache events or estimated from
    what was sent to it, see `PrefixCaches`; where other heads balance, too, a prompt that this one hardly knows is
    expected where all heads look for it, see `expected_prefix`.

    Up to eight replicas are all compared; of more, those with the longest matches, the one where the prompt is expected
    and a few others. Reasons: `prefix`: nobody compared is known to have more of the prompt; `rendezvous`: all heads
    look for it there; `prefix-spilled`: one has more; `least-load`: nobody has any. Fallbacks: `no-prompt` and
    `uncacheable`, both decided by load.

    Args:
        answer_tokens: what an answer costs each other one on the same replica, in prompt tokens; 0 or more.
        overlap_weight: what a token of the prompt costs that is not cached; 0 or more. Affinity grows with it.
        temperature: 0: the cheapest wins. Above: any may, with the probability of softmax of its negative cost, divided
            by this and by the difference of the highest and the lowest cost.
        rng: source of randomness; a freshly seeded one of its own by default.

    Raises:
        ConfigError: an option is out of range.
    """

    wants_cache_events = False
    binds_late = True

    def __init__(
        self,
        *,
        answer_tokens: float = 128,
        overlap_weight: float = 1.0,
        temperature: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self._answer_tokens = number("answer_tokens", answer_tokens, 0)
        self._overlap_weight = number("overlap_weight", overlap_weight, 0)
        self._temperature = number("temperature", temperature, 0)
        self._rng = rng or random.Random()
        self._table = RendezvousTable()
        self._bits = ReplicaBits()
        self._caches = PrefixCaches()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Compare costs. Raises ValueError when `replicas` is empty."""
        require_replicas(replicas)
        fleet = self._bits.fleet(replicas)
        prompt = task.get("prompt", NO_PROMPT)
        levels = self._levels(prompt, fleet)
        shared = has_other_heads(replicas)
        expected = expected_prefix(self._table, replicas, prompt, levels, fleet.block_sizes) if shared else None
        positions = self._to_compare(replicas, fleet, levels, expected)
        tokens = len(prompt.token_ids)
        costs, matches = self._compare(replicas, positions, fleet, levels, tokens, expected)
        if self._temperature:
            place = self._draw(costs, matches)
        elif shared and (coming := self._coming(replicas, matches, tokens, expected)) > 0:
            place = pick_lowest(costs, self._rng, coming)
        else:
            place = self._cheapest(costs, matches)
        position, matched, longest = positions[place], matches[place], max(matches)
        reason = "least-load" if not longest else "prefix" if matched == longest else "prefix-spilled"
        if expected is not None and position == expected.position and reason != "prefix":
            reason = "rendezvous"
        fallback = self._fallback(task, fleet, positions)
        return Decision(position, reason, tuple(map(Candidate, positions, costs, matches)), fallback, matched)

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """From here on the replica has the prompt cached, or will have it soon."""
        keys = prompt_keys(task.get("prompt", NO_PROMPT), block_size_of(replica))
        self._caches.send(self._bits.bit(replica), keys, capacity_of(replica))

    def dispatch_cancelled(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """It has no more of the prompt cached than before."""
        size = block_size_of(replica)
        keys = prompt_keys(task.get("prompt", NO_PROMPT), size)
        self._caches.withdraw(self._bits.bit(replica), keys, decision.matched_tokens // size)

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """It has the answer cached, too; all but the last token, which was never computed on."""
        prompt, answer = task.get("prompt", NO_PROMPT), task.get("answer_ids", ())
        bit, size = self._bits.bit(replica), block_size_of(replica)
        if self._caches.reporting >> bit & 1:
            self._caches.end(bit, prompt_keys(prompt, size))
        elif answer:
            self._caches.estimate(bit, answered_keys(prompt, answer, size), capacity_of(replica))

    def replica_lost(self, replica: ReplicaView) -> None:
        """Nothing is cached there."""
        bit = self._bits.free(replica)
        if bit is not None:
            self._caches.forget(bit)

    def cache_cleared(self, replica: ReplicaView) -> None:
        """Nothing is cached there any more, which its engine reports with its next step only."""
        self._caches.clear(self._bits.bit(replica))

    def cache_changed(self, replica: ReplicaView, change: CacheChange) -> None:
        """Its engine has reported."""
        self._caches.change(self._bits.bit(replica), change)

    def _levels(self, prompt: Prompt, fleet: FleetBits) -> list[Level]:
        """Tokens of the prompt, and the bits of those who have at least so many cached; longest match first."""
        levels: list[Level] = []
        for size in fleet.block_sizes:
            for blocks, holders in self._caches.levels(prompt_keys(prompt, size)):
                levels.append((blocks * size, holders))
        if len(levels) > 1:
            levels.sort(reverse=True)
        return levels

    def _to_compare(
        self,
        replicas: Sequence[ReplicaView],
        fleet: FleetBits,
        levels: Sequence[Level],
        expected: ExpectedPrefix | None,
    ) -> Sequence[int]:
        """The result of `positions_to_compare`; in a large fleet also replicas that may have the prompt cached."""
        positions = positions_to_compare(replicas, self._rng)
        if len(replicas) <= MOST_COMPARED:
            return positions
        if expected is not None and expected.position not in positions:
            positions.append(expected.position)
        wanted, others = _MOST_HOLDERS, fleet.mask
        for _, holders in levels:
            for bit in sample_bits(holders & others, wanted, self._rng):
                wanted -= 1
                position = fleet.positions[bit]
                if position not in positions:
                    positions.append(position)
            if not wanted:
                break
            others &= ~holders
        return positions

    def _compare(
        self,
        replicas: Sequence[ReplicaView],
        positions: Sequence[int],
        fleet: FleetBits,
        levels: Sequence[Level],
        tokens: int,
        expected: ExpectedPrefix | None,
    ) -> tuple[list[float], list[int]]:
        """What each replica would add to the latency of all requests, and how many tokens are known to match.

        One loop for all, without a call per replica: this is much of what a decision costs.
        """
        costs: list[float] = []
        matches: list[int] = []
        bits, weight, answer_tokens = fleet.bits, self._overlap_weight, self._answer_tokens
        lengths, prefill_tokens = replicas.work if isinstance(replicas, ServingReplicas) else _work(replicas, positions)
        for position in positions:
            bit, matched = bits[position], 0
            for level_tokens, holders in levels:
                if holders >> bit & 1:
                    matched = level_tokens
                    break
            requests = lengths[position]
            delayed = requests + 1 if requests < _MOST_DELAYED else _MOST_DELAYED
            costs.append(weight * (tokens - matched) * delayed + prefill_tokens[position] + answer_tokens * requests)
            matches.append(matched)
        if expected is not None:
            delayed = min(lengths[expected.position] + 1, _MOST_DELAYED)
            costs[positions.index(expected.position)] -= weight * expected.tokens * delayed
        return costs, matches

    def _coming(
        self, replicas: Sequence[ReplicaView], matches: Sequence[int], tokens: int, expected: ExpectedPrefix | None
    ) -> float:
        """What others probably add to these costs before anybody sees it, each as much as this prompt."""
        saved = max(matches) + (0.0 if expected is None else expected.tokens)
        return expected_arrivals(replicas, len(matches)) * (tokens - saved + self._answer_tokens)

    def _cheapest(self, costs: Sequence[float], matches: Sequence[int]) -> int:
        """The place of the lowest cost; of equal ones the longest match, ties of that uniformly at random."""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        places = [place for place, cost in enumerate(costs) if cost == least]
        longest = max([matches[place] for place in places])
        return self._rng.choice([place for place in places if matches[place] == longest])

    def _draw(self, costs: Sequence[float], matches: Sequence[int]) -> int:
        """The place of the replica that gets the request, at a temperature above 0."""
        least, spread = min(costs), max(costs) - min(costs)
        if not spread:
            return self._cheapest(costs, matches)
        weights = [math.exp((least - cost) / (spread * self._temperature)) for cost in costs]
        return self._rng.choices(range(len(costs)), weights)[0]

    def _fallback(self, task: Task, fleet: FleetBits, positions: Sequence[int]) -> str:
        prompt = task.get("prompt")
        if prompt is None:
            return "no-prompt"
        if not prompt.cacheable:
            return "uncacheable"
        if not self.wants_cache_events or not fleet.mask & ~self._caches.reporting:
            return ""
        compared = mask_of([fleet.bits[position] for position in positions])
        return "no-events" if compared & ~self._caches.reporting else ""


class KvAwareBalancer(PrefixBalancer):
    """`PrefixBalancer` for which the head's own engines report what they have cached.

    `overlap_weight * (prompt - matched) * min(4, requests + 1) + prefill_tokens + answer_tokens * requests` is what it
    compares, too. Reasons and fallbacks are the same: `prefix`, `prefix-spilled`, `rendezvous`, `least-load`;
    `no-prompt`, `uncacheable`; and `no-events`, when the cache of one of those compared is estimated.

    Args:
        answer_tokens: see `PrefixBalancer`.
        overlap_weight: see there.
        temperature: see there.
        rng: see there.

    Raises:
        ConfigError: an option is out of range.
    """

    wants_cache_events = True


def _work(replicas: Sequence[ReplicaView], positions: Sequence[int]) -> tuple[_ByPosition, _ByPosition]:
    """Requests and prefill tokens, of replicas that nobody keeps them for side by side."""
    loads = {position: load_of(replicas[position]) for position in positions}
    requests = {position: load.requests for position, load in loads.items()}
    return requests, {position: load.prefill_tokens for position, load in loads.items()}
