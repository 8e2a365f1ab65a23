"""Assigns a bit to each replica, so that a set of replicas is one integer."""

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from vllm_omni_plugin.balancing.interface import ReplicaView, identity_of, snapshot_of
from vllm_omni_plugin.balancing.loads.replica_load import load_of

_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_KV_BLOCKS = 8192


class FleetBits(NamedTuple):
    """The bits of a sequence of replicas by position, positions by bit, all bits, and all block sizes in tokens."""

    bits: list[int]
    positions: dict[int, int]
    mask: int
    block_sizes: frozenset[int]


class ReplicaBits:
    """Gives each replica the lowest free bit until `free` is called for it."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, str, str], int] = {}
        self._freed: list[int] = []
        self._seen: tuple[ReplicaView, ...] | None = None
        self._fleet = FleetBits([], {}, 0, frozenset())

    def bit(self, replica: ReplicaView) -> int:
        """The replica's bit; a new one at the first call."""
        identity = identity_of(replica)
        bit = self._bits.get(identity)
        if bit is None:
            bit = heappop(self._freed) if self._freed else len(self._bits)
            self._bits[identity] = bit
        return bit

    def free(self, replica: ReplicaView) -> int | None:
        """Free a replica's bit. Returns the bit, or None if it had none."""
        bit = self._bits.pop(identity_of(replica), None)
        if bit is not None:
            heappush(self._freed, bit)
            self._seen = None
        return bit

    def fleet(self, replicas: Sequence[ReplicaView]) -> FleetBits:
        """The bits of these replicas; O(1) for the same tuple as before."""
        snapshot = snapshot_of(replicas)
        if snapshot is not self._seen:
            bits = [self.bit(replica) for replica in snapshot]
            positions = {bit: position for position, bit in enumerate(bits)}
            self._fleet = FleetBits(bits, positions, mask_of(bits), frozenset(map(block_size_of, snapshot)))
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


def block_size_of(replica: ReplicaView) -> int:
    """Tokens in a KV block of a replica; vLLM's default if unknown."""
    return load_of(replica).block_size or _DEFAULT_BLOCK_SIZE


def capacity_of(replica: ReplicaView) -> int:
    """KV blocks of a replica; a guess if unknown."""
    return load_of(replica).kv_blocks or _DEFAULT_KV_BLOCKS
