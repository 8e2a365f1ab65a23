"""One index of the cached blocks of all replicas, so that a prompt is looked up once."""

from bisect import bisect_left
from collections.abc import Sequence

_MOST_SHARED_MASKS = 4096
_MOST_ENDS = 65_536

Level = tuple[int, int]
"""A number of leading blocks of a prompt, and the bit mask (see `ReplicaBits`) of the replicas that have them all."""


class BlockIndex:
    """Maps a block's key to the replicas that have it, as an integer with one bit for each replica.

    The cost of a look-up depends on the number of blocks, not of replicas. A bit may be reused for another replica once
    all blocks of the former one are removed.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        # Equal masks share one object: an integer of 1,024 bits takes more memory than the rest of a block's entry.
        self._masks: dict[int, int] = {}
        # By the first block of a level: where the level ended in the last search. Prompts with a common beginning
        # mostly differ from the same block on; then three look-ups in cold memory are enough instead of a dozen.
        self._ends: dict[int, int] = {}

    def has(self, bit: int, key: int) -> bool:
        return bool(self._holders.get(key, 0) >> bit & 1)

    def store(self, bit: int, keys: Sequence[int]) -> Sequence[int]:
        """Add blocks of a replica. Returns the keys that are new to it."""
        holders = self._holders
        # Most blocks are new to all replicas. One set operation overlaps the waits for cold memory.
        if holders.keys().isdisjoint(keys):
            alone = self._shared(1 << bit)
            for key in keys:
                holders[key] = alone
            return keys
        mask = 1 << bit
        gained: list[int] = []
        last, joined = 0, self._shared(mask)
        for key in keys:
            before = holders.get(key, 0)
            if before & mask:
                continue
            # Consecutive blocks mostly have the same holders.
            if before != last:
                last, joined = before, self._shared(before | mask)
            holders[key] = joined
            gained.append(key)
        return gained

    def remove(self, bit: int, keys: Sequence[int]) -> None:
        """Remove blocks of a replica; keys that it does not have are ignored."""
        mask, holders = 1 << bit, self._holders
        last = left = 0
        for key in keys:
            before = holders.get(key, 0)
            if not before & mask:
                continue
            if before == mask:
                del holders[key]
                continue
            if before != last:
                last, left = before, self._shared(before ^ mask)
            holders[key] = left

    def levels(self, keys: Sequence[int]) -> list[Level]:
        """How many leading blocks of `keys` each replica has: the shortest match, with the most holders, first.

        A binary search is exact here: a replica that has a block has all blocks before it, because an engine evicts the
        blocks of a prompt from its end.
        """
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
        """The end of the blocks that all replicas in `held` have, from `begin` on; block `known` is one of them."""
        get, last = self._holders.get, len(keys) - 1
        if get(keys[last]) == held:
            end = last + 1
        else:
            end = bisect_left(keys, 1, known + 1, last, key=lambda key: get(key) != held)
        if len(self._ends) >= _MOST_ENDS:
            self._ends.clear()
        self._ends[keys[begin]] = end
        return end

    def _shared(self, mask: int) -> int:
        if len(self._masks) >= _MOST_SHARED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)
