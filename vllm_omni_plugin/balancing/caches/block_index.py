"""Which replicas have which blocks: one index for all of them, so that a prompt is looked up once."""

from bisect import bisect_left
from collections.abc import Sequence

_MOST_SHARED_MASKS = 4096
_MOST_ENDS = 65_536

Level = tuple[int, int]
"""A number of a prompt's leading blocks, and who has at least so many as a bit mask, see `ReplicaBits`."""


class BlockIndex:
    """From a block's key to the replicas that have it, as one integer with a bit for each.

    What a look-up costs depends on the number of blocks, not on that of replicas. A bit may stand for another replica
    once the blocks of the former one are removed.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        # Equal masks are one object: an integer of 1,024 bits takes more memory than all else that a block needs.
        self._masks: dict[int, int] = {}
        # By a level's first block, the end of the level when it was last searched: prompts that begin alike mostly part
        # at the same block, and then it takes three look-ups instead of a dozen, each of them of cold memory.
        self._ends: dict[int, int] = {}

    def has(self, bit: int, key: int) -> bool:
        """Whether the replica has this block."""
        return bool(self._holders.get(key, 0) >> bit & 1)

    def store(self, bit: int, keys: Sequence[int]) -> Sequence[int]:
        """The replica has these blocks from now on. Returns those that it did not have."""
        holders = self._holders
        # Most are new to everybody. Asked all at once, the look-ups wait for cold memory together.
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
            # Blocks that follow each other mostly have the same holders.
            if before != last:
                last, joined = before, self._shared(before | mask)
            holders[key] = joined
            gained.append(key)
        return gained

    def remove(self, bit: int, keys: Sequence[int]) -> None:
        """The replica no longer has these blocks; those it did not have change nothing."""
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
        """Who has how many of the leading blocks of `keys`: the shortest match, with the most holders, first.

        Searches instead of walking, which is exact because who has a block has all blocks before it: an engine evicts
        the blocks of a prompt from its end.
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

    def _shared(self, mask: int) -> int:
        if len(self._masks) >= _MOST_SHARED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)
