"""Which replica a key belongs to: the same on every head, after every restart, with the fewest moves."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from vllm_omni_plugin.balancing.caches.block_index import Level
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.balancing.interface import Prompt, ReplicaView

_BUCKETS = 8192
_FEW_JOINERS = 8
"""With more joiners at once, buckets are decided again when they are asked for."""
_EXPECTED_SHARE = 0.75
"""Of what this head does not know of a prompt, the part that the replica where all heads look for it is expected to
have. Chosen with benchmarks/spread.py: more unites a few more prompts that belong together, and spreads prompts that
have nothing in common less evenly."""


class RendezvousTable:
    """Highest-random-weight hashing, remembered for a fixed number of buckets of keys.

    Each key falls into a bucket, and each bucket goes to the member whose hash with it is the highest. A member that
    joins takes only what it wins; one that leaves gives up only what it had: 1/n of all buckets on average, with a
    standard deviation of `sqrt(1/n * (1 - 1/n) / 8192)`, 0.6% at most. Nothing depends on the order of events.

    Buckets are decided when they are first asked for, in O(n), so that nothing takes longer for a larger fleet.
    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998), and XXH3 (Collet).
    """

    def __init__(self) -> None:
        self._members: dict[bytes, int] = {}
        self._owners: dict[int, bytes] = {}
        self._seen: tuple[ReplicaView, ...] = ()

    def follow(self, replicas: Sequence[ReplicaView]) -> None:
        """These replicas are all members; O(1) for the same tuple as the time before.

        A replica is known by its id, so that a restart moves nothing; one without an id by its address.
        """
        # A list may change in place, hence a copy; `tuple` would copy the pool's subclass of tuple, too.
        snapshot = replicas if isinstance(replicas, tuple) else tuple(replicas)
        if snapshot is not self._seen:
            self.update([str(getattr(replica, "replica_id", replica.input_addr)).encode() for replica in snapshot])
            self._seen = snapshot

    def update(self, members: Sequence[bytes]) -> None:
        """These are all members; a position in what follows is one among them."""
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
        """The position of the member that has `key`; of another, or by chance the same, for another attempt."""
        bucket = xxh3_64_intdigest(key, seed=attempt) % _BUCKETS
        owner = self._owners.get(bucket)
        if owner is None:
            owner = self._owners[bucket] = _heaviest(list(self._members), bucket)
        return self._members[owner]


class ExpectedPrefix(NamedTuple):
    """Where a prompt may be cached that this head has not sent itself.

    Attributes:
        position: of the replica in the fleet.
        tokens: how many of those that nobody is known to have.
    """

    position: int
    tokens: float


def expected_prefix(
    table: RendezvousTable,
    replicas: Sequence[ReplicaView],
    prompt: Prompt,
    levels: Sequence[Level],
    block_sizes: Collection[int],
) -> ExpectedPrefix | None:
    """Where heads that do not hear of each other's prompts all look for one, None if enough of it is known.

    A prompt of which a head knows less than a half is perhaps known to another. So the first block that it does not
    know has a replica, that of the table: prompts with a common beginning, of which a head knows nothing, have the
    same, and those that differ only behind a beginning that everybody knows have not.

    Args:
        table: of replicas, the same for every head.
        replicas: of the fleet.
        prompt: which may have less than a block.
        levels: tokens and who is known to have so many, longest match first.
        block_sizes: tokens in a block, all that occur.
    """
    known = levels[0][0] if levels else 0
    unknown = len(prompt.token_ids) - known
    if unknown <= known:
        return None
    block_size = min(block_sizes)
    keys = prompt_keys(prompt, block_size)
    if known // block_size >= len(keys):
        return None
    table.follow(replicas)
    key = keys[known // block_size].to_bytes(8, "little")
    return ExpectedPrefix(table.position(key), _EXPECTED_SHARE * unknown)


def _heaviest(names: Sequence[bytes], bucket: int) -> bytes:
    return max(names, key=lambda name: xxh3_64_intdigest(name, seed=bucket))
