"""What comes first among things that come and go."""

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

_FEW = 64

K = TypeVar("K", bound=Hashable)


class IndexedHeap(Generic[K]):
    """A priority queue out of whose middle anything can be taken in O(1); all else is O(log n).

    What was taken out stays in the heap until it comes to the front, or until it is half of it.
    """

    def __init__(self) -> None:
        self._keys: dict[K, Any] = {}
        self._heap: list[tuple[Any, int, K]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[K]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def add(self, item: K, key: Any) -> None:
        """Put an item in, or to another place. Equal keys keep the order in which they came."""
        self._added += 1
        self._keys[item] = place = (key, self._added)
        heappush(self._heap, (*place, item))
        if len(self._heap) > 2 * len(self._keys) + _FEW:
            self._heap = [(*place, item) for item, place in self._keys.items()]
            heapify(self._heap)

    def discard(self, item: K) -> None:
        """Take an item out, if it is there."""
        self._keys.pop(item, None)

    def first(self) -> tuple[Any, K] | None:
        """The lowest key and its item, which stays; None if there is nothing."""
        heap, keys = self._heap, self._keys
        while heap:
            key, added, item = heap[0]
            if keys.get(item) == (key, added):
                return key, item
            heappop(heap)
        return None
