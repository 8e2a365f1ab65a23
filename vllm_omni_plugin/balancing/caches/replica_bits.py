"""Assigns a bit to each replica, so that a set of replicas is one integer."""

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from vllm_omni_plugin.balancing.interface import ReplicaView, identity_of, snapshot_of
from vllm_omni_plugin.balancing.replica_load import load_of

_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_KV_BLOCKS = 8192
_MOST_BLOCKS = 2**22
"""More are not followed, whatever a replica says that it has. Each costs a head some 100 bytes."""


class FleetBits(NamedTuple):
    """The bits of a sequence of replicas by position, positions by bit, all bits, and all block sizes in tokens."""

    bits: list[int]
    positions: dict[int, int]
    mask: int
    block_sizes: frozenset[int]


class ReplicaCache(NamedTuple):
    """The prefix cache of a replica: its bit, tokens in a block, and blocks. Sizes that are not known are guesses."""

    bit: int
    block_size: int
    blocks: int


class ReplicaBits:
    """Gives each replica the lowest free bit until `free` is called for it. Its sizes do not change until then."""

    def __init__(self) -> None:
        self._caches: dict[tuple[int, str, str], ReplicaCache] = {}
        self._freed: list[int] = []
        self._seen: tuple[ReplicaView, ...] | None = None
        self._fleet = FleetBits([], {}, 0, frozenset())

    def cache(self, replica: ReplicaView) -> ReplicaCache:
        """The replica's cache, with a new bit at the first call."""
        identity = identity_of(replica)
        cache = self._caches.get(identity)
        if cache is None:
            bit = heappop(self._freed) if self._freed else len(self._caches)
            load = load_of(replica)
            blocks = min(load.kv_blocks or _DEFAULT_KV_BLOCKS, _MOST_BLOCKS)
            cache = ReplicaCache(bit, load.block_size or _DEFAULT_BLOCK_SIZE, blocks)
            self._caches[identity] = cache
        return cache

    def free(self, replica: ReplicaView) -> int | None:
        """Free a replica's bit. Returns the bit, or None if it had none."""
        cache = self._caches.pop(identity_of(replica), None)
        if cache is None:
            return None
        heappush(self._freed, cache.bit)
        self._seen = None
        return cache.bit

    def fleet(self, replicas: Sequence[ReplicaView]) -> FleetBits:
        """The bits of these replicas; O(1) for the same tuple as before."""
        if replicas is not self._seen:
            snapshot = snapshot_of(replicas)
            caches = [self.cache(replica) for replica in snapshot]
            bits = [cache.bit for cache in caches]
            positions = {bit: position for position, bit in enumerate(bits)}
            self._fleet = FleetBits(bits, positions, mask_of(bits), frozenset([cache.block_size for cache in caches]))
            self._seen = snapshot
        return self._fleet


def mask_of(bits: Sequence[int]) -> int:
    return sum(1 << bit for bit in bits)


def sample_bits(mask: int, count: int, rng: random.Random) -> list[int]:
    """Up to `count` random bits of a mask; not uniform: a bit after a gap is more likely."""
    chosen: list[int] = []
    too_many = mask.bit_count() > count
    while mask and len(chosen) < count:
        upper = mask
        if too_many:
            start = int(rng.random() * mask.bit_length())
            upper = mask >> start << start
        lowest = upper & -upper
        chosen.append(lowest.bit_length() - 1)
        mask ^= lowest
    return chosen
