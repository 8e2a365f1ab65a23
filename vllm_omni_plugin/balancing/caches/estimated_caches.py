"""What engines have cached, judged by what was sent to them."""

from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence

from vllm_omni_plugin.balancing.caches.block_index import BlockIndex, Level

_FEWEST_RUNS = 64


class EstimatedCaches:
    """The prefix caches of replicas, as they must be if each keeps what it computes and evicts as vLLM does.

    vLLM evicts the block that was used longest ago, and of blocks used at the same time the last of the prompt. So
    every block belongs to the *run* of the prompt that used it last, and the oldest run loses its last block first.

    Memory is bounded by the replicas' capacities: 8 bytes in a run and an entry of the index for each block.
    """

    def __init__(self) -> None:
        self._index = BlockIndex()
        self._replicas: defaultdict[int, _Runs] = defaultdict(_Runs)

    def levels(self, keys: Sequence[int]) -> list[Level]:
        """Which replicas probably have how much of a prompt."""
        return self._index.levels(keys)

    def use(self, bit: int, keys: Sequence[int], capacity: int) -> None:
        """A replica computes or reads these blocks.

        Takes time for the blocks it did not have, and those it evicts for them, but not for those it had.

        Args:
            bit: stands for the replica, see `ReplicaBits`.
            keys: all blocks of a prompt from its beginning.
            capacity: blocks the replica's memory has room for; what a prompt has beyond is not kept.
        """
        if not keys:
            return
        keys = keys[:capacity]
        runs = self._replicas[bit]
        known = runs.use(keys)
        evicted = runs.shrink(capacity)
        self._index.store(bit, keys[known:])
        self._index.remove(bit, evicted)

    def clear(self, bit: int) -> None:
        """The replica has nothing cached."""
        runs = self._replicas.pop(bit, None)
        if runs is not None:
            self._index.remove(bit, runs.shrink(0))


class _Runs:
    """The runs of one replica, oldest first.

    Runs that later ones took over stay as empty arrays until they may be half of all.
    """

    def __init__(self) -> None:
        self._size = 0
        self._most_runs = _FEWEST_RUNS
        self._by_age: deque[array[int]] = deque()
        self._by_head: dict[int, array[int]] = {}

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
        self._by_age.append(run)
        self._size += len(run)
        if len(self._by_age) > self._most_runs:
            self._by_age = deque(filter(None, self._by_age))
            self._most_runs = 2 * len(self._by_age) + _FEWEST_RUNS
        return known

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
