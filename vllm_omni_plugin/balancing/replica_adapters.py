"""Which LoRA adapters a replica has loaded, and what one more costs there."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

ADAPTER_TOKENS = 4000.0
"""Cost of loading an adapter into a free slot while there are more adapters than slots, in prompt tokens: 0.4 s of an
8B model on one accelerator. Chosen in simulations: a quarter of it loaded adapters more often, the double gained
nothing."""
_MAKES_WAY, _NO_SLOT = 1.5 * ADAPTER_TOKENS, 2 * ADAPTER_TOKENS
_MAX_KEY_CHARS = 40


def adapter_key(name: str) -> str:
    """A LoRA adapter's name in reports between heads: a short one of plain characters is its own, others are hashed."""
    if len(name) <= _MAX_KEY_CHARS and name.isascii() and name.isprintable() and not {'"', "\\"} & {*name}:
        return name
    return xxh3_128_hexdigest(name.encode(errors="surrogatepass"))


class ReplicaAdapters(NamedTuple):
    """The LoRA adapters of one replica at one moment, by their keys, as they follow from the requests of all heads.

    Engines do not report them: those in vLLM's `SchedulerStats` are the front end's own count. Like vLLM's
    `LRUCacheLoRAModelManager`, it keeps the most recently used ones.

    Attributes:
        slots: how many adapters the engine has loaded at once (`--max-loras`); 0: none, or unknown.
        in_use: unfinished requests by adapter, those of other heads counted as one; the first adapters have the slots,
            others wait for one.
        idle: further loaded adapters, the least recently used first.
    """

    slots: int = 0
    in_use: Mapping[str, int] = {}
    idle: tuple[str, ...] = ()

    def charge(self, name: str) -> "ReplicaAdapters":
        """The adapters after a request of this adapter is charged."""
        in_use = {**self.in_use, name: self.in_use.get(name, 0) + 1}
        return self._with(in_use, tuple([each for each in self.idle if each != name]))

    def release(self, name: str) -> "ReplicaAdapters":
        """The adapters after a request of this adapter is over."""
        in_use = {**self.in_use, name: self.in_use[name] - 1}
        if in_use[name]:
            return self._with(in_use, self.idle)
        del in_use[name]
        return self._with(in_use, (*self.idle, name))

    def with_others(self, before: Collection[str], now: Collection[str]) -> "ReplicaAdapters":
        """The adapters after other heads have reported these ones in use `now`, and those `before`."""
        adapters = self
        for name in now:
            adapters = adapters if name in before else adapters.charge(name)
        for name in before:
            adapters = adapters if name in now else adapters.release(name)
        return adapters

    def has(self, name: str) -> bool:
        """Whether the adapter is loaded, or waits for a slot."""
        return name in self.in_use or name in self.idle

    def cost(self, name: str, crowded: bool) -> float:
        """What this adapter costs here, see `adapter_costs`; `crowded`: there are more adapters than slots."""
        slots, in_use, idle = self
        if not slots or name in idle or name in islice(in_use, slots):
            return 0.0
        if name in in_use:
            return ADAPTER_TOKENS
        if len(in_use) >= slots:
            return _NO_SLOT
        if len(in_use) + len(idle) >= slots:
            return _MAKES_WAY
        return ADAPTER_TOKENS if crowded else 0.0

    def _with(self, in_use: Mapping[str, int], idle: tuple[str, ...]) -> "ReplicaAdapters":
        evicted = max(0, len(in_use) + len(idle) - self.slots)
        return ReplicaAdapters(self.slots, in_use, idle[evicted:])


NO_ADAPTERS = ReplicaAdapters()


def adapter_costs(name: str, replicas: Sequence[ReplicaAdapters]) -> list[float]:
    """What a request of this adapter costs more on each of the compared replicas, in prompt tokens.

    Nothing where the adapter is loaded. A free slot costs nothing either while the replicas together have no more
    adapters than one has slots, so with few adapters only the load counts; else `ADAPTER_TOKENS`, as where the adapter
    waits for a slot. Half of it more where an adapter without requests makes way, and twice as much where all slots
    have requests: an engine computes requests of no further adapter until all those of one have ended.

    Source: the `lora-affinity-scorer` of the Gateway API Inference Extension, which llm-d uses, too: loaded, then a
    free slot, then waiting, then none. Here these are costs, so that load outweighs them.
    """
    known = {name}.union(*[(*each.in_use, *each.idle) for each in replicas])
    return [each.cost(name, crowded=len(known) > each.slots) for each in replicas]
