"""Small integers for replicas, so that a set of replicas is one integer."""

from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from vllm_omni_plugin.balancing.base import ReplicaView
from vllm_omni_plugin.balancing.load import load_of

_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_KV_BLOCKS = 8192
_identity_of = attrgetter("stage_id", "input_addr", "output_addr")


def block_size_of(replica: ReplicaView) -> int:
    """Tokens in a block of a replica's KV memory; vLLM's default for one that has not said."""
    return load_of(replica).block_size or _DEFAULT_BLOCK_SIZE


def capacity_of(replica: ReplicaView) -> int:
    """Blocks of a replica's KV memory; a guess for one that has not said."""
    return load_of(replica).kv_blocks or _DEFAULT_KV_BLOCKS


class Membership(NamedTuple):
    """The replicas a policy is asked about.

    Attributes:
        slots: by position.
        positions: by slot.
        mask: a bit for each slot.
        block_sizes: tokens in a block, all that occur.
    """

    slots: list[int]
    positions: dict[int, int]
    mask: int
    block_sizes: frozenset[int]


class ReplicaSlots:
    """Gives each replica the lowest free slot for as long as it is not forgotten, whether it serves or not."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str, str], int] = {}
        self._freed: list[int] = []
        self._seen: tuple[ReplicaView, ...] | None = None
        self._membership = Membership([], {}, 0, frozenset())

    def slot(self, replica: ReplicaView) -> int:
        """The replica's slot, a new one if it has none."""
        identity = _identity_of(replica)
        slot = self._slots.get(identity)
        if slot is None:
            slot = heappop(self._freed) if self._freed else len(self._slots)
            self._slots[identity] = slot
        return slot

    def free(self, replica: ReplicaView) -> int | None:
        """Take a replica's slot back. Returns it, None if there was none."""
        slot = self._slots.pop(_identity_of(replica), None)
        if slot is not None:
            heappush(self._freed, slot)
            self._seen = None
        return slot

    def membership(self, replicas: Sequence[ReplicaView]) -> Membership:
        """The slots of these replicas; O(1) for the same tuple as the time before."""
        # A list may change in place, hence a copy; `tuple` would copy the pool's subclass of tuple, too.
        snapshot = replicas if isinstance(replicas, tuple) else tuple(replicas)
        if snapshot is not self._seen:
            slots = [self.slot(replica) for replica in snapshot]
            positions = {slot: position for position, slot in enumerate(slots)}
            mask = sum(1 << slot for slot in positions)
            self._membership = Membership(slots, positions, mask, frozenset(map(block_size_of, snapshot)))
            self._seen = snapshot
        return self._membership
