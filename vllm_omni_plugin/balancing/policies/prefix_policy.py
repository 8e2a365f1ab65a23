"""Weighs the cached beginning of a prompt against the load of the replica that has it."""

import math
import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.caches.block_keys import answered_keys, prompt_keys
from vllm_omni_plugin.balancing.caches.prefix_caches import Level, PrefixCaches
from vllm_omni_plugin.balancing.caches.rendezvous import ExpectedPrefix, RendezvousTable, expected_prefix
from vllm_omni_plugin.balancing.caches.replica_bits import (
    FleetBits,
    ReplicaBits,
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
from vllm_omni_plugin.balancing.policy_options import number
from vllm_omni_plugin.balancing.replica_adapters import adapter_costs, adapter_key
from vllm_omni_plugin.balancing.replica_load import context_cost, load_of
from vllm_omni_plugin.balancing.sampling import (
    MOST_COMPARED,
    expected_arrivals,
    has_other_heads,
    pick_lowest,
    positions_to_compare,
)

_MOST_HOLDERS = 3
"""Replicas with the longest matches that are compared in a large fleet."""
_MOST_DELAYED = 4
"""At most this many requests are counted as delayed by a token to compute. So a cold replica gets requests while it is
idle, and does not stay too expensive when it is busy. Chosen in simulations: 2 and 8 were worse, no bound
was worst."""


class PrefixBalancer(DecidingBalancer):
    """Sends a prompt to the replica that has most of it cached, unless the load there outweighs the saving.

    The lowest `overlap_weight * (prompt - matched) * min(4, requests + 1) + prefill_tokens + answer_tokens * requests +
    context_cost` wins: the latency that the choice adds to all requests, in prompt tokens. Uncached tokens delay all
    requests of the replica, the waiting prefill delays this request, the answers delay each other, and long contexts
    delay all. Of equal costs the longest match wins, then a random one. For the cached tokens see `PrefixCaches`, with
    several heads `expected_prefix`, for decode work and KV memory `context_cost`, and for a LoRA adapter
    `adapter_costs`, which are added.

    Source: LMetric, `(prompt - matched) * (load + 1)`. Added to it are a price of answers, without which all copies of
    a fully cached prompt would go to one replica, and the waiting prefill, as in Dynamo's cost. The prefill is added,
    not multiplied; otherwise all requests for a context would avoid the replica that is computing it. Weight and
    temperature are those of NVIDIA Dynamo's KV router.

    Reasons: `prefix`, `prefix-spilled`, `rendezvous`, `least-load`. Fallbacks: `no-prompt`, `uncacheable`.
    docs/policies.md explains them and the options.
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
        require_replicas(replicas)
        fleet = self._bits.fleet(replicas)
        prompt = task.get("prompt", NO_PROMPT)
        levels = self._levels(prompt, fleet)
        shared = has_other_heads(replicas)
        expected = expected_prefix(self._table, replicas, prompt, levels, fleet.block_sizes) if shared else None
        adapter = adapter_key(prompt.lora_name) if prompt.lora_name else ""
        positions = self._to_compare(replicas, fleet, levels, expected, adapter)
        tokens = len(prompt.token_ids)
        costs, matches = self._compare(replicas, positions, fleet, levels, tokens=tokens, expected=expected)
        if adapter:
            adapters = [load_of(replicas[position]).adapters for position in positions]
            costs = [cost + more for cost, more in zip(costs, adapter_costs(adapter, adapters), strict=True)]
        if self._temperature:
            place = self._draw(costs, matches)
        elif shared and (arrivals := self._arriving_cost(replicas, matches, tokens, expected)) > 0:
            place = pick_lowest(costs, self._rng, arrivals)
        else:
            place = self._cheapest(costs, matches)
        position, matched, longest = positions[place], matches[place], max(matches)
        reason = "least-load" if not longest else "prefix" if matched == longest else "prefix-spilled"
        if expected is not None and position == expected.position and reason != "prefix":
            reason = "rendezvous"
        fallback = self._fallback(task, fleet, positions)
        return Decision(position, reason, tuple(map(Candidate, positions, costs, matches)), fallback, matched)

    def assigned(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        bit, size, blocks = self._bits.cache(replica)
        self._caches.send(bit, prompt_keys(task.get("prompt", NO_PROMPT), size), blocks)

    def assignment_cancelled(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        bit, size, _ = self._bits.cache(replica)
        keys = prompt_keys(task.get("prompt", NO_PROMPT), size)
        self._caches.undo_estimate(bit, keys, decision.matched_tokens // size)

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """The answer is cached, too, as the engine reports it or as is estimated."""
        prompt, answer = task.get("prompt", NO_PROMPT), task.get("answer_ids", ())
        bit, size, blocks = self._bits.cache(replica)
        if self._caches.reporting >> bit & 1:
            self._caches.end(bit, prompt_keys(prompt, size))
        elif answer:
            self._caches.estimate(bit, answered_keys(prompt, answer, size), blocks)

    def replica_lost(self, replica: ReplicaView) -> None:
        bit = self._bits.free(replica)
        if bit is not None:
            self._caches.forget(bit)

    def cache_cleared(self, replica: ReplicaView) -> None:
        self._caches.clear(self._bits.cache(replica).bit)

    def cache_changed(self, replica: ReplicaView, change: CacheChange) -> None:
        bit, _, blocks = self._bits.cache(replica)
        self._caches.change(bit, change, blocks)

    def _levels(self, prompt: Prompt, fleet: FleetBits) -> list[Level]:
        """Matched tokens, and the bit mask of the replicas that have so many cached; longest match first."""
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
        adapter: str,
    ) -> Sequence[int]:
        """The result of `positions_to_compare`; in a large fleet also replicas that may have the prompt cached."""
        if len(replicas) <= MOST_COMPARED:
            return range(len(replicas))
        positions = positions_to_compare(replicas, self._rng, adapter)
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
        *,
        tokens: int,
        expected: ExpectedPrefix | None,
    ) -> tuple[list[float], list[int]]:
        """The cost and the matched tokens of each replica."""
        costs: list[float] = []
        matches: list[int] = []
        bits, weight, answer_tokens = fleet.bits, self._overlap_weight, self._answer_tokens
        for position in positions:
            bit, matched = bits[position], 0
            for level_tokens, holders in levels:
                if holders >> bit & 1:
                    matched = level_tokens
                    break
            load = load_of(replicas[position])
            requests = load.requests
            delayed = requests + 1 if requests < _MOST_DELAYED else _MOST_DELAYED
            uncached: float = tokens - matched
            if expected is not None and position == expected.position:
                uncached -= expected.tokens
            costs.append(
                weight * uncached * delayed + load.prefill_tokens + answer_tokens * requests + context_cost(load)
            )
            matches.append(matched)
        return costs, matches

    def _arriving_cost(
        self, replicas: Sequence[ReplicaView], matches: Sequence[int], tokens: int, expected: ExpectedPrefix | None
    ) -> float:
        """The cost that unreported requests of other heads probably add, each as much as this prompt."""
        saved = max(matches) + (0.0 if expected is None else expected.tokens)
        return expected_arrivals(replicas, len(matches)) * (tokens - saved + self._answer_tokens)

    def _cheapest(self, costs: Sequence[float], matches: Sequence[int]) -> int:
        """Index of the lowest cost; ties go to the longest match, then uniformly at random."""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        places = [place for place, cost in enumerate(costs) if cost == least]
        longest = max([matches[place] for place in places])
        return self._rng.choice([place for place in places if matches[place] == longest])

    def _draw(self, costs: Sequence[float], matches: Sequence[int]) -> int:
        """Index of a replica drawn by softmax, for a temperature above 0."""
        least, spread = min(costs), max(costs) - min(costs)
        if not spread:
            return self._cheapest(costs, matches)
        weights = [math.exp((least - cost) / (spread * self._temperature)) for cost in costs]
        return self._rng.choices(range(len(costs)), weights)[0]

    def _fallback(self, task: Task, fleet: FleetBits, positions: Sequence[int]) -> str:
        """Why the decision knows less than it could: no prompt, nothing cacheable, or engines that report no caches."""
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
    """`PrefixBalancer` that makes the head's own engines report their caches.

    It has the further fallback `no-events`: the cache of a compared replica is estimated.
    """

    wants_cache_events = True
