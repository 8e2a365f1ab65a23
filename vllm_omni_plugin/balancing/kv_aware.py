"""Where a prompt's beginning is cached by the engines' own word, weighed against the work that they have."""

import math
import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.base import DecidingBalancer, ReplicaView, Task, require_replicas
from vllm_omni_plugin.balancing.block_keys import answered_keys, prompt_keys
from vllm_omni_plugin.balancing.cache_change import CacheChange
from vllm_omni_plugin.balancing.decision import Decision
from vllm_omni_plugin.balancing.homes import PromptHomes
from vllm_omni_plugin.balancing.matching import (
    TokenLevels,
    cheapest,
    coming_cost,
    compare,
    decision_for,
    positions_to_compare,
)
from vllm_omni_plugin.balancing.options import number
from vllm_omni_plugin.balancing.prompt import NO_PROMPT, Prompt
from vllm_omni_plugin.balancing.reported_caches import ReportedCaches
from vllm_omni_plugin.balancing.sampling import are_shared
from vllm_omni_plugin.balancing.slots import Membership, ReplicaSlots, block_size_of, capacity_of

_ANSWER_TOKENS = 128


class KvAwareBalancer(DecidingBalancer):
    """Sends a prompt where it costs least, knowing from vLLM's KV cache events what every engine has cached.

    The lowest `overlap_weight * (prompt - matched) * min(4, requests + 1) + prefill_tokens + 128 * requests` wins: the
    cost of `PrefixBalancer`, see there, from better knowledge of what is cached. Equal costs go to the longest match,
    then at random. The weight and the temperature are those of NVIDIA Dynamo's KV router; its cost, in which each token
    of a running request counts as one to be computed, made conversations and tenants with long contexts lose their
    caches in our simulator.

    What was sent to an engine and not reported yet counts as cached. Where an engine reports nothing, or some of its
    reports were lost, what was sent to it counts, see `ReportedCaches`. What other heads have sent and no engine has
    reported yet is expected at its home, see `PromptHomes`.

    Compared are those that `positions_to_compare` names. Reasons: see `decision_for`. Fallbacks: `no-prompt` and
    `uncacheable`, decided by load; `no-events` and `stale-events`, when the cache of one of those compared was
    estimated since its engine never reported it, or reports were lost.

    Args:
        overlap_weight: what a token of the prompt costs that is not cached; 0 or more. Affinity grows with it.
        temperature: 0: the cheapest wins. Above: any may, with the probability of softmax of its negative cost, divided
            by this and by the difference of the highest and the lowest cost.
        rng: source of randomness; a freshly seeded one of its own by default.

    Raises:
        ConfigError: an option is out of range.
    """

    wants_cache_events = True

    def __init__(
        self, *, overlap_weight: float = 1.0, temperature: float = 0.0, rng: random.Random | None = None
    ) -> None:
        self._overlap_weight = number("overlap_weight", overlap_weight, 0)
        self._temperature = number("temperature", temperature, 0)
        self._rng = rng or random.Random()
        self._homes = PromptHomes()
        self._slots = ReplicaSlots()
        self._caches = ReportedCaches()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Compare cost. Raises ValueError when `replicas` is empty."""
        require_replicas(replicas)
        members = self._slots.membership(replicas)
        prompt = task.get("prompt", NO_PROMPT)
        levels = self._levels(prompt, members)
        shared = are_shared(replicas)
        home = self._homes.find(replicas, prompt, levels, members.block_sizes) if shared else None
        positions = positions_to_compare(replicas, members, levels, self._rng, home)
        tokens = len(prompt.token_ids)
        scores, matches = compare(
            replicas, positions, members.slots, levels, tokens, _ANSWER_TOKENS, self._overlap_weight, home
        )
        known = prompt.cacheable and not self._caches.shortcoming(members.mask)
        fallback = "" if known else self._fallback(task, members, positions)
        if self._temperature:
            place = self._draw(scores, matches)
        else:
            coming = coming_cost(replicas, matches, home, tokens, _ANSWER_TOKENS) if shared else 0.0
            place = cheapest(scores, matches, self._rng, coming)
        return decision_for(place, positions, scores, matches, fallback, home)

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """The replica is about to have the prompt cached."""
        keys = prompt_keys(task.get("prompt", NO_PROMPT), block_size_of(replica))
        self._caches.send(self._slots.slot(replica), keys, capacity_of(replica))

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """From here on only what its engine reports of it counts, or an estimate."""
        prompt, size, slot = task.get("prompt", NO_PROMPT), block_size_of(replica), self._slots.slot(replica)
        self._caches.end(slot, prompt_keys(prompt, size))
        answer = task.get("answer_ids", ())
        if answer and self._caches.shortcoming(1 << slot):
            self._caches.estimate(slot, answered_keys(prompt, answer, size), capacity_of(replica))

    def forgotten(self, replica: ReplicaView) -> None:
        """Nothing is cached there."""
        slot = self._slots.free(replica)
        if slot is not None:
            self._caches.clear(slot)

    def cleared(self, replica: ReplicaView) -> None:
        """Nothing is cached there, which its engine reports with its next step only."""
        self._caches.empty(self._slots.slot(replica))

    def cache_changed(self, replica: ReplicaView, change: CacheChange) -> None:
        """Its engine has reported."""
        self._caches.change(self._slots.slot(replica), change)

    def _levels(self, prompt: Prompt, members: Membership) -> TokenLevels:
        levels: list[tuple[int, int]] = []
        for size in members.block_sizes:
            for blocks, holders in self._caches.levels(prompt_keys(prompt, size), members.mask):
                levels.append((blocks * size, holders))
        if len(levels) > 1:
            levels.sort(reverse=True)
        return levels

    def _fallback(self, task: Task, members: Membership, positions: Sequence[int]) -> str:
        if not task.get("prompt", NO_PROMPT).cacheable:
            return "uncacheable" if "prompt" in task else "no-prompt"
        return self._caches.shortcoming(sum(1 << members.slots[position] for position in positions))

    def _draw(self, costs: Sequence[float], matches: Sequence[int]) -> int:
        """The place of the replica that gets the request, at a temperature above 0."""
        lowest, spread = min(costs), max(costs) - min(costs)
        if not spread:
            return cheapest(costs, matches, self._rng)
        weights = [math.exp((lowest - cost) / (spread * self._temperature)) for cost in costs]
        return self._rng.choices(range(len(costs)), weights)[0]
