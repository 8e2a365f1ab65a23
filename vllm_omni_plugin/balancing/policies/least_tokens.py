"""Chooses the shortest expected wait, computed from tokens."""

import random
from collections.abc import Iterable, Sequence

from vllm_omni_plugin.balancing.interface import (
    NO_PROMPT,
    Candidate,
    DecidingBalancer,
    Decision,
    ReplicaView,
    Task,
    prompt_tokens,
    require_replicas,
)
from vllm_omni_plugin.balancing.policy_options import number
from vllm_omni_plugin.balancing.replica_adapters import adapter_costs, adapter_key
from vllm_omni_plugin.balancing.replica_load import DECODE_WEIGHT, KV_TOKENS, ReplicaLoad, context_cost, load_of
from vllm_omni_plugin.balancing.sampling import expected_arrivals, pick_lowest, positions_to_compare

_UNMEASURED_RATE = 10_000.0
"""Assumed prompt tokens per second while no rate is known: an 8B model on one accelerator."""

_TRUSTED_FACTOR = 8.0
"""Bounds the ratio of a measured rate to the usual one. A replica measured during its warm-up would otherwise get no
requests, and so no better measurement."""


class LeastTokensBalancer(DecidingBalancer):
    """Sends a request to the replica where the expected wait for the first token is the shortest.

        seconds = (prefill + prompt + context_cost) / rate

    `prefill` are the replica's tokens to be computed, `prompt` those of the request, and `rate` the measured prompt
    tokens per second (by default the median of those compared). A request of another head counts as long as this one:
    as being decoded, or as to be computed if other heads do not report and the engine says that it waits.

    A request with a LoRA adapter costs `adapter_costs` more.

    Source: queued tokens over the measured rate; for decode work and KV memory see `context_cost`. The reason is
    `expected-wait`, the fallback `no-rate`. docs/policies.md has the options.
    """

    binds_late = True

    def __init__(
        self, *, decode_weight: float = DECODE_WEIGHT, kv_tokens: float = KV_TOKENS, rng: random.Random | None = None
    ) -> None:
        self._decode_weight = number("decode_weight", decode_weight, 0, 10)
        self._kv_tokens = number("kv_tokens", kv_tokens, 0)
        self._rng = rng or random.Random()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """The replica whose queue is expected to be through first; unmeasured ones get the median rate."""
        require_replicas(replicas)
        prompt, lora_name = prompt_tokens(task), task.get("prompt", NO_PROMPT).lora_name
        adapter = adapter_key(lora_name) if lora_name else ""
        positions = positions_to_compare(replicas, self._rng, adapter)
        loads = [load_of(replicas[position]) for position in positions]
        rates = sorted([load.prefill_rate for load in loads if load.prefill_rate > 0])
        usual_rate = rates[len(rates) // 2] if rates else _UNMEASURED_RATE
        more = adapter_costs(adapter, [load.adapters for load in loads]) if adapter else [0.0] * len(loads)
        waits = self._expected_waits(loads, prompt, more, usual_rate)
        arrivals = expected_arrivals(replicas, len(positions)) * prompt / usual_rate
        position = positions[pick_lowest(waits, self._rng, arrivals)]
        fallback = "" if rates else "no-rate"
        return Decision(position, "expected-wait", tuple(map(Candidate, positions, waits)), fallback)

    def _expected_waits(
        self, loads: Iterable[ReplicaLoad], prompt: int, more: Iterable[float], usual_rate: float
    ) -> list[float]:
        decode_weight, kv_tokens = self._decode_weight, self._kv_tokens
        slowest, fastest = usual_rate / _TRUSTED_FACTOR, usual_rate * _TRUSTED_FACTOR
        waits = []
        for load, adapter_tokens in zip(loads, more, strict=True):
            tokens = load.prefill_tokens + prompt + adapter_tokens + context_cost(load, decode_weight, kv_tokens)
            if load.others:
                waiting = 0 if load.heads_report else min(load.others, load.waiting)
                tokens += prompt * (waiting + decode_weight * (load.others - waiting))
            rate = load.prefill_rate or usual_rate
            if not slowest <= rate <= fastest:
                rate = slowest if rate < slowest else fastest
            waits.append(tokens / rate)
        return waits
