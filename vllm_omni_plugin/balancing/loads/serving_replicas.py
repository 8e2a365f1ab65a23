"""The replicas that take requests, with what is known of all of them at once."""

import random
from array import array
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from vllm_omni_plugin.balancing.interface import ReplicaView
from vllm_omni_plugin.balancing.loads.replica_load import load_of
from vllm_omni_plugin.balancing.loads.unreported import UnreportedRequests, draw_by_water_filling

R = TypeVar("R", bound=ReplicaView)


class ServingReplicas(tuple[R, ...]):
    """Replicas in a fixed order, with their queue lengths and prefill tokens, which their owner keeps up to date.

    Another object means another membership. What is known of all is gathered when it is first asked for, in O(n); from
    then on a change of one replica and a question are O(1), but for a heap of the different lengths there are.

    Args:
        replicas: in their order.
        unreported: what other heads send to them. By default there are none.

    Attributes:
        unreported: as above.
    """

    def __new__(cls, replicas: Iterable[R], unreported: UnreportedRequests | None = None) -> "ServingReplicas[R]":
        """The tuple, before `__init__`."""
        return super().__new__(cls, replicas)

    def __init__(self, replicas: Iterable[R], unreported: UnreportedRequests | None = None) -> None:
        self.unreported = unreported or UnreportedRequests()
        self._index: _QueueIndex | None = None
        self._places: dict[int, int] = {}
        self._prefill_tokens = array("q")

    @property
    def total_queue_length(self) -> int:
        """The sum of all queue lengths."""
        return self._indexed().total

    def shortest(self, rng: random.Random) -> int:
        """The place of a replica with the shortest queue, ties uniformly at random. There must be one at least.

        Where others choose as well, one of the short queues, see `draw_by_water_filling`.
        """
        index = self._index or self._indexed()
        coming = self.unreported.requests
        return index.short(rng, coming) if coming > 0 else index.shortest(rng)

    @property
    def work(self) -> tuple[Sequence[int], Sequence[int]]:
        """The queue lengths and the prefill tokens, by place; as they are now, and not to be changed.

        They stand side by side: the loads of a large fleet are all over the memory, most in no cache of a processor.
        """
        index = self._index or self._indexed()
        return index.lengths, self._prefill_tokens

    def changed(self, replica: R) -> None:
        """The queue length of a replica or its prefill tokens may have changed. It may be none of these."""
        if self._index is not None and (place := self._places.get(id(replica))) is not None:
            self._index.change(place, replica.queue_length)
            self._prefill_tokens[place] = load_of(replica).prefill_tokens

    def _indexed(self) -> "_QueueIndex":
        if self._index is None:
            self._places = {id(replica): place for place, replica in enumerate(self)}
            self._prefill_tokens = array("q", [load_of(replica).prefill_tokens for replica in self])
            self._index = _QueueIndex([replica.queue_length for replica in self])
        return self._index


class _QueueIndex:
    """Places by queue length.

    Args:
        lengths: the length at each place.

    Attributes:
        total: the sum of all lengths.
        lengths: as they are now.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.total = sum(lengths)
        self.lengths = lengths
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
        before = self.lengths[place]
        if length == before:
            return
        self._take(place, self._buckets[before])
        bucket = self._buckets.get(length)
        if bucket is None:
            bucket = self._buckets[length] = []
            heappush(self._heap, length)
        self._put(place, bucket)
        self.lengths[place] = length
        self.total += length - before

    def shortest(self, rng: random.Random) -> int:
        """A place of the smallest length."""
        while not (bucket := self._buckets[self._heap[0]]):
            del self._buckets[heappop(self._heap)]
        return bucket[int(rng.random() * len(bucket))]

    def short(self, rng: random.Random, coming: float) -> int:
        """A place drawn by `draw_by_water_filling`."""
        buckets = self._buckets
        levels = [(length, count) for length in sorted(self._heap) if (count := len(buckets[length]))]
        bucket = buckets[levels[draw_by_water_filling(levels, coming, rng)][0]]
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
