"""A priority queue from which any item can be removed."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

_MIN_REBUILD = 64

K = TypeVar("K", bound=Hashable)


class IndexedHeap(Generic[K]):
    """Items ordered by key. `discard` is O(1), `add` and `first` are O(log n) amortised.

    A discarded item stays in the heap until it comes to the front, or until half of the heap is discarded items.
    """

    def __init__(self) -> None:
        self._keys: dict[K, Any] = {}
        self._heap: list[tuple[Any, int, K]] = []
        self._added = 0

    def add(self, item: K, key: Any) -> None:
        """Add an item, or change its key. Items with equal keys keep the order in which they were added."""
        self._added += 1
        self._keys[item] = place = (key, self._added)
        heappush(self._heap, (*place, item))
        if len(self._heap) > 2 * len(self._keys) + _MIN_REBUILD:
            self._heap = [(*place, item) for item, place in self._keys.items()]
            heapify(self._heap)

    def discard(self, item: K) -> None:
        self._keys.pop(item, None)

    def first(self) -> tuple[Any, K] | None:
        """The lowest key and its item, which stays in the heap; None if it is empty."""
        heap, keys = self._heap, self._keys
        while heap:
            key, added, item = heap[0]
            if keys.get(item) == (key, added):
                return key, item
            heappop(heap)
        return None
