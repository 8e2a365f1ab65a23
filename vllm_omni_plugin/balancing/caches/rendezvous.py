"""Assigns keys to replicas, the same on every head and after every restart, with few moves."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.balancing.caches.prefix_caches import Level
from vllm_omni_plugin.balancing.interface import Prompt, ReplicaView, snapshot_of

_BUCKETS = 8192
_FEW_JOINERS = 8
"""If more replicas join at once, the owners of all buckets are computed again when needed."""
_EXPECTED_SHARE = 0.75
"""Share of a prompt's unknown tokens that its rendezvous replica is expected to have cached. Chosen with
simulations of eight heads: a higher share unites a few more related prompts, and spreads unrelated ones less evenly."""


class RendezvousTable:
    """Highest-random-weight hashing with a fixed number of buckets.

    Each key falls into a bucket, and each bucket belongs to the member whose hash with it is the highest. A member that
    joins takes only the buckets that it wins, and one that leaves gives up only its own. The order of events does not
    matter. The owner of a bucket is computed at its first use, in O(n), and cached.

    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998), and XXH3 (Collet).
    """

    def __init__(self) -> None:
        self._members: dict[bytes, int] = {}
        self._owners: dict[int, bytes] = {}
        self._seen: tuple[ReplicaView, ...] = ()

    def set_replicas(self, replicas: Sequence[ReplicaView]) -> None:
        """Make these replicas the members, by id, so that a restart moves no keys; O(1) for the same tuple."""
        snapshot = snapshot_of(replicas)
        if snapshot is not self._seen:
            self.set_members([str(getattr(replica, "replica_id", replica.input_addr)).encode() for replica in snapshot])
            self._seen = snapshot

    def set_members(self, members: Sequence[bytes]) -> None:
        """Replace the members; later results are indices into `members`."""
        before, self._members = self._members, {name: position for position, name in enumerate(members)}
        joined = [name for name in self._members if name not in before]
        if len(joined) > _FEW_JOINERS:
            self._owners.clear()
        for bucket, owner in list(self._owners.items()):
            if owner not in self._members:
                del self._owners[bucket]
            elif joined:
                self._owners[bucket] = _heaviest([owner, *joined], bucket)

    def position(self, key: bytes, attempt: int = 0) -> int:
        """The index of the member that owns `key`. Each `attempt` gives an independent choice."""
        bucket = xxh3_64_intdigest(key, seed=attempt) % _BUCKETS
        owner = self._owners.get(bucket)
        if owner is None:
            owner = self._owners[bucket] = _heaviest(list(self._members), bucket)
        return self._members[owner]


class ExpectedPrefix(NamedTuple):
    """The replica to which other heads have probably sent a prompt, and the unknown tokens it is expected to have."""

    position: int
    tokens: float


def expected_prefix(
    table: RendezvousTable,
    replicas: Sequence[ReplicaView],
    prompt: Prompt,
    levels: Sequence[Level],
    block_sizes: Collection[int],
) -> ExpectedPrefix | None:
    """The replica where all heads expect a prompt to be cached; None if this head knows at least half of the prompt.

    The first unknown block determines the replica. So prompts with a common unknown beginning get the same replica,
    and prompts that differ only after a known beginning get different ones. `levels` has token counts and the replicas
    known to have them cached, longest match first.
    """
    known = levels[0][0] if levels else 0
    unknown = len(prompt.token_ids) - known
    if unknown <= known:
        return None
    block_size = min(block_sizes)
    keys = prompt_keys(prompt, block_size)
    if known // block_size >= len(keys):
        return None
    table.set_replicas(replicas)
    key = keys[known // block_size].to_bytes(8, "little")
    return ExpectedPrefix(table.position(key), _EXPECTED_SHARE * unknown)


def _heaviest(names: Sequence[bytes], bucket: int) -> bytes:
    return max(names, key=lambda name: xxh3_64_intdigest(name, seed=bucket))
