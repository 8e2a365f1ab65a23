"""The replicas that take requests, with what is known of all of them at once."""

import random
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from vllm_omni_plugin.balancing.base import ReplicaView

R = TypeVar("R", bound=ReplicaView)


class ServingReplicas(tuple[R, ...]):
    """Replicas in a fixed order, and an index of their queue lengths that their owner keeps up to date.

    Another object means another membership. The index is made when it is first asked for, in O(n); from then on a
    change of one length and a question are O(1), but for a heap of the different lengths there are.
    """

    def __init__(self, replicas: Iterable[R]) -> None:
        # A tuple's content comes to it before this, by __new__.
        self._index: _QueueIndex | None = None
        self._places: dict[int, int] = {}

    @property
    def total_queue_length(self) -> int:
        """The sum of all queue lengths."""
        return self._indexed().total

    def shortest(self, rng: random.Random) -> int:
        """The place of a replica with the shortest queue, ties uniformly at random. There must be one at least."""
        return self._indexed().shortest(rng)

    def changed(self, replica: R) -> None:
        """The queue length of one of the replicas may have changed."""
        if self._index is not None:
            self._index.change(self._places[id(replica)], replica.queue_length)

    def _indexed(self) -> "_QueueIndex":
        if self._index is None:
            self._places = {id(replica): place for place, replica in enumerate(self)}
            self._index = _QueueIndex([replica.queue_length for replica in self])
        return self._index


class _QueueIndex:
    """Places by queue length.

    Args:
        lengths: the length at each place.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.total = sum(lengths)
        self._lengths = lengths
        self._buckets: dict[int, list[int]] = {}
        # Where each place stands in the bucket of its length.
        self._ranks = [0] * len(lengths)
        for place, length in enumerate(lengths):
            self._put(place, self._buckets.setdefault(length, []))
        # Every length that has a bucket, some of them empty.
        self._heap = list(self._buckets)
        heapify(self._heap)

    def change(self, place: int, length: int) -> None:
        """Give a place another length."""
        before = self._lengths[place]
        if length == before:
            return
        self._take(place, self._buckets[before])
        bucket = self._buckets.get(length)
        if bucket is None:
            bucket = self._buckets[length] = []
            heappush(self._heap, length)
        self._put(place, bucket)
        self._lengths[place] = length
        self.total += length - before

    def shortest(self, rng: random.Random) -> int:
        """A place of the smallest length."""
        while not (bucket := self._buckets[self._heap[0]]):
            del self._buckets[heappop(self._heap)]
        return bucket[int(rng.random() * len(bucket))]

    def _put(self, place: int, bucket: list[int]) -> None:
        self._ranks[place] = len(bucket)
        bucket.append(place)

    def _take(self, place: int, bucket: list[int]) -> None:
        """Remove a place; the last of the bucket gets its rank."""
        last = bucket.pop()
        if last != place:
            rank = self._ranks[place]
            bucket[rank] = last
            self._ranks[last] = rank
