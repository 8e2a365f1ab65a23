"""What one engine has cached, judged by what was sent to it."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

_FEWEST_RUNS = 64


class PromptRuns:
    """The prefix cache of one replica, as it must be if it keeps what it computes and evicts as vLLM does.

    vLLM evicts the block that was used longest ago, and of blocks used at the same time the last of the prompt. So
    every block belongs to the *run* of the prompt that used it last, and the oldest run loses its last block first.

    Memory is bounded by the replica's capacity: 8 bytes for each block.
    """

    def __init__(self) -> None:
        self._size = 0
        self._most_runs = _FEWEST_RUNS
        # Oldest first. Runs that later ones took over stay as empty arrays until they may be half of all.
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
