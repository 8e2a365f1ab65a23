"""The content of all prefix caches of a fleet: one index of their blocks, as reported by engines or else estimated."""

from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence

from vllm_omni_plugin.balancing.interface import CacheChange

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


_FEWEST_RUNS = 64
_SHORTEST_COMPACTED = 1024
_MOST_REPORTED = 2
"""Of a replica's blocks. Models with several kinds of attention may also report parts of a block."""


class EstimatedCache:
    """Estimates the prefix cache of one replica by simulating vLLM's eviction, with 8 bytes for each block.

    vLLM evicts the least recently used block, and of blocks used at the same time the last one of the prompt. So every
    block belongs to the *run* of the prompt that used it last, and the oldest run loses its last block first. `size` is
    the number of cached blocks.
    """

    def __init__(self) -> None:
        self.size = 0
        self._most_runs = _FEWEST_RUNS
        # Oldest first. A run whose blocks all moved to later runs stays as an empty array until a clean-up.
        self._by_age: deque[array[int]] = deque()
        self._by_head: dict[int, array[int]] = {}

    def use(self, keys: Sequence[int]) -> int:
        """Make the blocks of a prompt the latest run. Returns how many of them were cached already."""
        run = array("Q", keys)
        known = 0
        while known < len(run) and (other := self._by_head.pop(keys[known], None)) is not None:
            common = _common_length(run[known : known + len(other)], other)
            del other[:common]
            if other:
                self._by_head[other[0]] = other
            self.size -= common
            known += common
        self._by_head[keys[0]] = run
        self._by_age.append(run)
        self.size += len(run)
        if len(self._by_age) > self._most_runs:
            self._by_age = deque(filter(None, self._by_age))
            self._most_runs = 2 * len(self._by_age) + _FEWEST_RUNS
        return known

    def undo(self, keys: Sequence[int], known: int) -> "array[int]":
        """Undo `use` of a prompt of which `known` blocks were cached before. Returns the removed keys."""
        place, own, begins = 0, None, 0
        while place < len(keys) and (run := self._by_head.get(keys[place])) is not None:
            common = _common_length(array("Q", keys[place : place + len(run)]), run)
            own, begins = (run, place) if common == len(run) else (None, 0)
            place += common
        if own is None or begins + len(own) <= known:
            return array("Q")
        kept = max(0, known - begins)
        gone = own[kept:]
        del own[kept:]
        self.size -= len(gone)
        if not own:
            del self._by_head[gone[0]]
        return gone

    def shrink(self, capacity: int) -> "array[int]":
        """Evict blocks until `capacity` are left. Returns the evicted keys."""
        evicted = array("Q")
        while self.size > capacity:
            oldest = self._by_age[0]
            kept = max(0, len(oldest) - (self.size - capacity))
            evicted += oldest[kept:]
            self.size -= len(oldest) - kept
            if kept:
                del oldest[kept:]
            else:
                self._by_age.popleft()
                if oldest:
                    del self._by_head[oldest[0]]
        return evicted


def _common_length(left: "array[int]", right: "array[int]") -> int:
    """Leading keys that two chains share. Keys are chained, so after the first difference none are equal."""
    shorter = min(len(left), len(right))
    if left[shorter - 1] == right[shorter - 1]:
        return shorter
    return bisect_left(range(shorter), 1, key=lambda place: left[place] != right[place])


class PrefixCaches:
    """The prefix caches of all replicas, by bit (see `ReplicaBits`). `reporting` is the mask of the reporting replicas.

    Reports of an engine are exact but late, so sent prompts that are not reported yet count as cached. The cache of a
    replica that does not report is estimated from what is sent to it. If reports are lost, the cache counts as empty
    and is estimated until the engine reports from the beginning again.
    """

    def __init__(self) -> None:
        self.reporting = 0
        # A mask like `reporting`.
        self._overfull = 0
        self._index = BlockIndex()
        self._estimated: defaultdict[int, EstimatedCache] = defaultdict(EstimatedCache)
        # By bit: the reported keys, so that a cache can be cleared. Removed keys stay until the next compaction.
        self._stored: dict[int, array[int]] = {}
        self._compacted_from: dict[int, int] = {}
        # By bit: blocks of sent prompts that are not reported yet, with the number of prompts that contain each.
        self._expected: dict[int, dict[int, int]] = {}

    def levels(self, keys: Sequence[int]) -> list[Level]:
        return self._index.levels(keys)

    def send(self, bit: int, keys: Sequence[int], capacity: int) -> None:
        """Note that a prompt with these blocks is sent to a replica with memory for `capacity` blocks."""
        if not self.reporting >> bit & 1:
            self.estimate(bit, keys, capacity)
            return
        expected = self._expected.setdefault(bit, {})
        known = max((blocks for blocks, holders in self._index.levels(keys) if holders >> bit & 1), default=0)
        if expected:
            for key in expected.keys() & keys[:known]:
                expected[key] += 1
        added = keys[known:]
        expected.update(dict.fromkeys(added, 1))
        self._store(bit, added)

    def end(self, bit: int, keys: Sequence[int]) -> None:
        """Note that a prompt has ended: its blocks that a reporting engine has not reported by now are not cached."""
        expected = self._expected.get(bit)
        if not expected:
            return
        gone: list[int] = []
        for key in keys:
            prompts = expected.get(key, 0)
            if prompts > 1:
                expected[key] = prompts - 1
            elif prompts:
                del expected[key]
                gone.append(key)
        self._index.remove(bit, gone)

    def estimate(self, bit: int, keys: Sequence[int], capacity: int) -> None:
        """Note that a replica that does not report uses the blocks of a prompt, from its beginning."""
        if not keys:
            return
        keys = keys[:capacity]
        runs = self._estimated[bit]
        known = runs.use(keys)
        evicted = runs.shrink(capacity) if runs.size > capacity else ()
        self._index.store(bit, keys[known:])
        if evicted:
            self._index.remove(bit, evicted)

    def undo_estimate(self, bit: int, keys: Sequence[int], known: int) -> None:
        """Undo `estimate` for a prompt of which `known` blocks were cached before; see `end` for reporting replicas."""
        if not self.reporting >> bit & 1 and (runs := self._estimated.get(bit)) is not None:
            self._index.remove(bit, runs.undo(keys, known))

    def change(self, bit: int, change: CacheChange, capacity: int) -> None:
        """Apply a report of an engine with memory for `capacity` blocks; after a loss of reports what is sent to it
        counts, until the next whole one. An engine that reports many more blocks than it has counts as one of these."""
        if change.restart:
            self._overfull &= ~(1 << bit)
        elif self._overfull >> bit & 1:
            return
        if change.restart or not self.reporting >> bit & 1:
            self.clear(bit)
        if not change.complete:
            self.reporting &= ~(1 << bit)
            return
        self.reporting |= 1 << bit
        self._index.remove(bit, change.removed)
        self._store(bit, change.stored)
        # Not in `send`, because a request waits for that.
        if self._compact(bit) > _MOST_REPORTED * capacity:
            self.forget(bit)
            self._overfull |= 1 << bit
            return
        if expected := self._expected.get(bit):
            for key in (*change.removed, *change.stored):
                expected.pop(key, None)

    def clear(self, bit: int) -> None:
        self._index.remove(bit, self._stored.pop(bit, array("Q")))
        self._compacted_from.pop(bit, None)
        self._expected.pop(bit, None)
        if (runs := self._estimated.pop(bit, None)) is not None:
            self._index.remove(bit, runs.shrink(0))

    def forget(self, bit: int) -> None:
        """Drop a lost replica, so that its bit can be reused."""
        self.clear(bit)
        self.reporting &= ~(1 << bit)
        self._overfull &= ~(1 << bit)

    def _store(self, bit: int, keys: Sequence[int]) -> None:
        self._stored.setdefault(bit, array("Q")).extend(self._index.store(bit, keys))

    def _compact(self, bit: int) -> int:
        """Forget removed keys when there are many. Returns how many keys are left then, else 0."""
        stored = self._stored[bit]
        if len(stored) <= self._compacted_from.get(bit, _SHORTEST_COMPACTED):
            return 0
        held = self._stored[bit] = array("Q", {key for key in stored if self._index.has(bit, key)})
        self._compacted_from[bit] = 2 * len(held) + _SHORTEST_COMPACTED
        return len(held)
