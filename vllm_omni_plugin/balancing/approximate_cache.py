"""What engines have cached, judged by what was sent to them."""

from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from vllm_omni_plugin.balancing.prefix_index import BlockHolders, Level

_FEWEST_RUNS = 64


class ApproximateCaches:
    """The prefix caches of all replicas, as they must be if each keeps what it computes and evicts as vLLM does.

    vLLM evicts the block that was used longest ago, and of blocks used at the same time the last of the prompt. So
    every block belongs to the *run* of the prompt that used it last, and the oldest run loses its last block first.
    A block is never evicted before those behind it, hence a holder of a block has all blocks before it.

    A replica may be hidden while nobody asks who has what of it: most of the work is then left undone.

    Memory is bounded by the replicas' capacities: 8 bytes in a run and, unless hidden, an entry of the index for each
    block.
    """

    def __init__(self) -> None:
        self._index = BlockHolders()
        self._replicas: defaultdict[int, _Runs] = defaultdict(_Runs)
        self._hidden: set[int] = set()

    def blocks(self, slot: int) -> int:
        """Blocks that a replica is thought to have."""
        return len(self._replicas.get(slot, ()))

    def levels(self, keys: Sequence[int]) -> list[Level]:
        """See `BlockHolders.levels`; without hidden replicas. Takes O(log blocks) for each level."""
        return self._index.closed_levels(keys)

    def matches(self, keys: Sequence[int]) -> dict[int, int]:
        """See `BlockHolders.matches`; without hidden replicas."""
        return self._index.matches(keys)

    def use(self, slot: int, keys: Sequence[int], capacity: int) -> None:
        """A replica computes or reads these blocks.

        Takes time for the blocks it did not have, and those it evicts for them, but not for those it had.

        Args:
            slot: stands for the replica.
            keys: all blocks of a prompt from its beginning.
            capacity: blocks the replica's memory has room for; what a prompt has beyond is not kept.
        """
        if not keys:
            return
        keys = keys[:capacity]
        runs = self._replicas[slot]
        known = runs.use(keys)
        evicted = runs.shrink(capacity)
        if slot not in self._hidden:
            self._index.store(slot, keys[known:])
            self._index.remove(slot, evicted)

    def hide(self, slot: int) -> None:
        """Nobody will ask for what the replica has until it is shown. Takes time for its blocks unless it is hidden."""
        if slot not in self._hidden:
            self._hidden.add(slot)
            for run in self._replicas.get(slot, ()):
                self._index.remove(slot, run)

    def show(self, slot: int) -> None:
        """The end of `hide`: what was used meanwhile counts. Takes time for the replica's blocks if it was hidden."""
        if slot in self._hidden:
            self._hidden.remove(slot)
            for run in self._replicas.get(slot, ()):
                self._index.store(slot, run)

    def clear(self, slot: int) -> None:
        """The replica has nothing cached. Its slot may be given to another, which is hidden if this one was."""
        runs = self._replicas.pop(slot, None)
        if runs is not None and slot not in self._hidden:
            self._index.remove(slot, runs.shrink(0))


class _Runs:
    """The runs of one replica, oldest first.

    Runs that later ones took over stay as empty arrays until they may be half of all.
    """

    def __init__(self) -> None:
        self._size = 0
        self._most_runs = _FEWEST_RUNS
        self._by_age: deque[array[int]] = deque()
        self._by_head: dict[int, array[int]] = {}

    def __len__(self) -> int:
        """Number of blocks."""
        return self._size

    def __iter__(self) -> "Iterator[array[int]]":
        return iter(self._by_age)

    def use(self, keys: Sequence[int]) -> int:
        """Make the blocks of a prompt the latest run. Returns how many of them there were already."""
        run = array("Q", keys)
        known = 0
        while known < len(run) and (other := self._by_head.pop(keys[known], None)) is not None:
            common = _common_length(run[known : known + len(other)], other)
            del other[:common]
            if other:
                self._by_head[other[0]] = other
            self._size -= common
            known += common
        self._by_head[keys[0]] = run
        self.append(run)
        return known

    def append(self, run: "array[int]") -> None:
        """Add a run that is younger than all others."""
        self._by_age.append(run)
        self._size += len(run)
        if len(self._by_age) > self._most_runs:
            self._by_age = deque(filter(None, self._by_age))
            self._most_runs = 2 * len(self._by_age) + _FEWEST_RUNS

    def shrink(self, capacity: int) -> "array[int]":
        """Evict what is beyond the capacity. Returns the keys."""
        evicted = array("Q")
        while self._size > capacity:
            oldest = self._by_age[0]
            kept = max(0, len(oldest) - (self._size - capacity))
            evicted += oldest[kept:]
            self._size -= len(oldest) - kept
            if kept:
                del oldest[kept:]
            else:
                self._by_age.popleft()
                if oldest:
                    del self._by_head[oldest[0]]
        return evicted


def _common_length(left: "array[int]", right: "array[int]") -> int:
    """Leading blocks that two chains share. Keys name all that is before them: after a difference nothing is equal."""
    shorter = min(len(left), len(right))
    if left[shorter - 1] == right[shorter - 1]:
        return shorter
    return bisect_left(range(shorter), 1, key=lambda place: left[place] != right[place])
