"""Which replicas have which blocks: one index for all of them, so that a prompt is looked up once."""

import random
from array import array
from bisect import bisect_left
from collections.abc import Sequence

_MOST_SHARED_MASKS = 4096
_MOST_ENDS = 65_536
_SHORTEST_COMPACTED = 1024


Level = tuple[int, int]
"""A number of a prompt's leading blocks, and who has at least so many: bit *i* stands for slot *i*."""


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
        # By a level's first block, the end of the level when it was last searched: prompts that begin alike mostly part
        # at the same block, and then it takes three look-ups instead of a dozen, each of them of cold memory.
        self._ends: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of distinct blocks."""
        return len(self._holders)

    def blocks(self, slot: int) -> int:
        """Number of blocks the slot holds."""
        return self._blocks.get(slot, 0)

    def store(self, slot: int, keys: Sequence[int]) -> Sequence[int]:
        """The slot has these blocks from now on. Returns those that it did not have."""
        holders, before = self._holders, len(self._holders)
        # Most are new to everybody. Asked all at once, the look-ups wait for cold memory together.
        if holders.keys().isdisjoint(keys):
            alone = self._shared(1 << slot)
            for key in keys:
                holders[key] = alone
            self._blocks[slot] = self.blocks(slot) + len(holders) - before
            return keys
        return self._join(slot, keys)

    def _join(self, slot: int, keys: Sequence[int]) -> list[int]:
        bit, holders = 1 << slot, self._holders
        gained: list[int] = []
        last, joined = 0, self._shared(bit)
        for key in keys:
            before = holders.get(key, 0)
            if before & bit:
                continue
            # Blocks that follow each other mostly have the same holders.
            if before != last:
                last, joined = before, self._shared(before | bit)
            holders[key] = joined
            gained.append(key)
        self._blocks[slot] = self.blocks(slot) + len(gained)
        return gained

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """The slot no longer has these blocks; those it did not have change nothing."""
        bit, holders, removed = 1 << slot, self._holders, 0
        last = left = 0
        for key in keys:
            before = holders.get(key, 0)
            if not before & bit:
                continue
            removed += 1
            if before == bit:
                del holders[key]
                continue
            if before != last:
                last, left = before, self._shared(before ^ bit)
            holders[key] = left
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
                levels.append((blocks, held))
                held = still
                if not held:
                    return levels
        return [*levels, (len(keys), held)] if held else levels

    def closed_levels(self, keys: Sequence[int]) -> list[Level]:
        """As `levels`, where every holder of a block has all blocks before it: a search instead of a walk."""
        get, ends, total = self._holders.get, self._ends, len(keys)
        levels: list[Level] = []
        begin, held = 0, get(keys[0], 0) if keys else 0
        while held:
            end = ends.get(keys[begin], total)
            if not begin < end <= total:
                end = total
            following = get(keys[end], 0) if end < total else 0
            if following == held or get(keys[end - 1]) != held:
                end = self._search_end(keys, held, begin, end if following == held else begin)
                following = get(keys[end], 0) if end < total else 0
            levels.append((end, held))
            begin, held = end, following
        return levels

    def _search_end(self, keys: Sequence[int], held: int, begin: int, known: int) -> int:
        """The place behind the last block that all of `held` have, of those from `begin` on; `known` is one of them."""
        get, last = self._holders.get, len(keys) - 1
        if get(keys[last]) == held:
            end = last + 1
        else:
            end = bisect_left(keys, 1, known + 1, last, key=lambda key: get(key) != held)
        if len(self._ends) >= _MOST_ENDS:
            self._ends.clear()
        self._ends[keys[begin]] = end
        return end

    def matches(self, keys: Sequence[int]) -> dict[int, int]:
        """Leading blocks of `keys` by slot, of all slots that have the first one."""
        return {slot: blocks for blocks, holders in self.levels(keys) for slot in slots_of(holders)}

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

    def store(self, slot: int, keys: Sequence[int]) -> Sequence[int]:
        """See `BlockHolders.store`."""
        gained = super().store(slot, keys)
        stored = self._stored.setdefault(slot, array("Q"))
        stored.extend(gained)
        if len(stored) > 2 * self.blocks(slot) + _SHORTEST_COMPACTED:
            held = {key for key in stored if self._holders.get(key, 0) >> slot & 1}
            self._stored[slot] = array("Q", held)
        return gained

    def clear(self, slot: int) -> None:
        """The slot holds nothing, and may be given to another replica."""
        self.remove(slot, self._stored.pop(slot, array("Q")))
        del self._blocks[slot]


def slots_of(holders: int) -> list[int]:
    """The slots of a mask, in ascending order."""
    slots: list[int] = []
    while holders:
        lowest = holders & -holders
        slots.append(lowest.bit_length() - 1)
        holders ^= lowest
    return slots


def some_slots_of(holders: int, count: int, rng: random.Random) -> list[int]:
    """At most so many slots of a mask, at random, though one after a gap is likelier than one after another."""
    chosen: list[int] = []
    too_many = holders.bit_count() > count
    while holders and len(chosen) < count:
        upper = holders
        if too_many:
            start = int(rng.random() * holders.bit_length())
            upper = holders >> start << start
        lowest = upper & -upper
        chosen.append(lowest.bit_length() - 1)
        holders ^= lowest
    return chosen
