"""Which replicas have which blocks: one index for all of them, so that a prompt is looked up once."""

import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST_SHARED_MASKS = 4096
_SHORTEST_COMPACTED = 1024


class Level(NamedTuple):
    """The replicas that have at least so many leading blocks of a prompt: bit *i* of `holders` stands for slot *i*."""

    blocks: int
    holders: int


class BlockHolders:
    """From a block's key to its holders, as one integer with a bit for each.

    A slot is a small integer that its owner gives a replica, and may give another once the replica's blocks are
    removed. What a look-up costs depends on the number of blocks, not on that of replicas.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        # Equal masks are one object: an integer of 1,024 bits takes more memory than all else that a block needs.
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of distinct blocks."""
        return len(self._holders)

    def blocks(self, slot: int) -> int:
        """Number of blocks the slot holds."""
        return self._blocks.get(slot, 0)

    def store(self, slot: int, keys: Sequence[int]) -> None:
        """The slot has these blocks from now on; those it had already change nothing."""
        bit, holders, stored = 1 << slot, self._holders, 0
        for key in keys:
            before = holders.get(key, 0)
            if not before & bit:
                holders[key] = self._shared(before | bit)
                stored += 1
        self._blocks[slot] = self.blocks(slot) + stored

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """The slot no longer has these blocks; those it did not have change nothing."""
        bit, holders, removed = 1 << slot, self._holders, 0
        for key in keys:
            before = holders.get(key, 0)
            if not before & bit:
                continue
            removed += 1
            if before == bit:
                del holders[key]
            else:
                holders[key] = self._shared(before ^ bit)
        self._blocks[slot] = self.blocks(slot) - removed

    def levels(self, keys: Sequence[int]) -> list[Level]:
        """Who has how many of the leading blocks of `keys`: the shortest match, with the most holders, first."""
        levels: list[Level] = []
        held = self._holders.get(keys[0], 0) if keys else 0
        for blocks, mask in enumerate(map(self._holders.get, keys)):
            if mask is held:
                continue
            still = held & (mask or 0)
            if still != held:
                levels.append(Level(blocks, held))
                held = still
                if not held:
                    return levels
        return [*levels, Level(len(keys), held)] if held else levels

    def closed_levels(self, keys: Sequence[int]) -> list[Level]:
        """As `levels`, where every holder of a block has all blocks before it: a search instead of a walk."""
        levels: list[Level] = []
        held = self._holders.get(keys[0], 0) if keys else 0
        while held:
            blocks = self._end_of_level(keys, held, levels[-1].blocks if levels else 0)
            levels.append(Level(blocks, held))
            held = self._holders.get(keys[blocks], 0) if blocks < len(keys) else 0
        return levels

    def _end_of_level(self, keys: Sequence[int], held: int, begin: int) -> int:
        get, last = self._holders.get, len(keys) - 1
        if get(keys[last]) == held:
            return last + 1
        return bisect_left(keys, 1, begin + 1, last, key=lambda key: get(key) != held)

    def matches(self, keys: Sequence[int]) -> dict[int, int]:
        """Leading blocks of `keys` by slot, of all slots that have the first one."""
        return {slot: level.blocks for level in self.levels(keys) for slot in slots_of(level.holders)}

    def _shared(self, mask: int) -> int:
        if len(self._masks) >= _MOST_SHARED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)


class PrefixIndex(BlockHolders):
    """`BlockHolders` that can clear a slot without being told what it holds.

    For that it notes the keys that a slot stored, 8 bytes each, and sorts the removed ones out once they are the most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[int, array[int]] = {}

    def store(self, slot: int, keys: Sequence[int]) -> None:
        """See `BlockHolders.store`."""
        super().store(slot, keys)
        stored = self._stored.setdefault(slot, array("Q"))
        stored.extend(keys)
        if len(stored) > 2 * self.blocks(slot) + _SHORTEST_COMPACTED:
            held = {key for key in stored if self._holders.get(key, 0) >> slot & 1}
            self._stored[slot] = array("Q", held)

    def clear(self, slot: int) -> None:
        """The slot holds nothing, and may be given to another replica."""
        self.remove(slot, self._stored.pop(slot, array("Q")))
        del self._blocks[slot]


def slots_of(holders: int) -> Iterator[int]:
    """The slots of a mask, in ascending order."""
    while holders:
        lowest = holders & -holders
        yield lowest.bit_length() - 1
        holders ^= lowest


def some_slots_of(holders: int, count: int, rng: random.Random) -> list[int]:
    """At most so many slots of a mask, at random, though one after a gap is likelier than one after another."""
    chosen: list[int] = []
    while holders and len(chosen) < count:
        start = int(rng.random() * holders.bit_length())
        upper = holders >> start << start
        lowest = upper & -upper
        chosen.append(lowest.bit_length() - 1)
        holders ^= lowest
    return chosen
