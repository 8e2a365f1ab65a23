"""Where a prompt's beginning is cached, blended with load."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.approximate_cache import ApproximateCaches
from vllm_omni_plugin.balancing.base import DecidingBalancer, ReplicaView, Task, require_replicas
from vllm_omni_plugin.balancing.block_keys import answered_keys, prompt_keys
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
from vllm_omni_plugin.balancing.sampling import are_shared
from vllm_omni_plugin.balancing.slots import Membership, ReplicaSlots, block_size_of, capacity_of


class PrefixBalancer(DecidingBalancer):
    """Sends a prompt where most of it is cached, unless the work that waits there outweighs the saving.

    The lowest `(prompt - matched) * min(4, requests + 1) + prefill_tokens + answer_tokens * requests` wins, the latency
    that the choice adds to all requests, in prompt tokens: what it computes delays everybody on the replica, what waits
    there delays it alone, and its answer and those of the others delay each other. No thresholds, hence nothing that is
    noise at low load. A replica with an empty cache and nothing to do gets a prompt that is cached elsewhere once all
    who have it have `prompt / answer_tokens` requests. Equal scores go to the longest match, then at random.

    Source: LMetric, `(prompt - matched) * (load + 1)`, with a price of answers, without which a prompt that is cached
    as a whole would cost nothing and draw any number of its like to one replica; and the prefill that waits, as in
    Dynamo's cost. It is added and not multiplied, or the one replica that is just computing a context would be
    avoided by all who need it, and each of them would compute it elsewhere. What a replica has cached is inferred from
    what was sent to it, see `ApproximateCaches`; where other heads balance, too, a prompt that this one hardly knows is
    expected at its home, see `PromptHomes`.

    Compared are those that `positions_to_compare` names. Reasons: see `decision_for`. Fallbacks: `no-prompt`,
    `uncacheable`, both decided by load.

    Args:
        answer_tokens: what an answer costs each other one on the same replica, in prompt tokens; 0 or more.
        rng: source of randomness; a freshly seeded one of its own by default.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(self, *, answer_tokens: float = 128, rng: random.Random | None = None) -> None:
        self._answer_tokens = number("answer_tokens", answer_tokens, 0)
        self._rng = rng or random.Random()
        self._homes = PromptHomes()
        self._slots = ReplicaSlots()
        self._caches = ApproximateCaches()

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
        scores, matches = compare(replicas, positions, members.slots, levels, tokens, self._answer_tokens, home=home)
        coming = coming_cost(replicas, matches, home, tokens, self._answer_tokens) if shared else 0.0
        place = cheapest(scores, matches, self._rng, coming)
        fallback = "" if prompt.cacheable else "uncacheable" if "prompt" in task else "no-prompt"
        return decision_for(place, positions, scores, matches, fallback, home)

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """From here on the replica has the prompt cached."""
        self._use(replica, prompt_keys(task.get("prompt", NO_PROMPT), block_size_of(replica)))

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """It has the answer cached, too; all but the last token, which was never computed on."""
        prompt, answer = task.get("prompt", NO_PROMPT), task.get("answer_ids", ())
        if answer:
            self._use(replica, answered_keys(prompt, answer, block_size_of(replica)))

    def forgotten(self, replica: ReplicaView) -> None:
        """Nothing is cached there."""
        slot = self._slots.free(replica)
        if slot is not None:
            self._caches.clear(slot)

    def cleared(self, replica: ReplicaView) -> None:
        """Nothing is cached there any more."""
        self._caches.clear(self._slots.slot(replica))

    def _use(self, replica: ReplicaView, keys: Sequence[int]) -> None:
        self._caches.use(self._slots.slot(replica), keys, capacity_of(replica))

    def _levels(self, prompt: Prompt, members: Membership) -> TokenLevels:
        levels: list[tuple[int, int]] = []
        for size in members.block_sizes:
            for blocks, holders in self._caches.levels(prompt_keys(prompt, size)):
                levels.append((blocks * size, holders))
        if len(levels) > 1:
            levels.sort(reverse=True)
        return levels
