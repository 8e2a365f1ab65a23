"""The replicas that take requests, with what is known of all of them at once."""

import random
from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
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
        # By place, and empty until somebody asks.
        self._lengths: list[int] = []
        self._prefill_tokens = array("q")
        self._total = 0
        self._places: dict[int, int] = {}
        # Places by queue length, and where each place stands in the bucket of its length.
        self._buckets: dict[int, list[int]] = {}
        self._ranks: list[int] = []
        # Every length that has a bucket, some of them empty.
        self._heap: list[int] = []

    @property
    def total_queue_length(self) -> int:
        """The sum of all queue lengths."""
        if not self._places:
            self._gather()
        return self._total

    @property
    def work(self) -> tuple[Sequence[int], Sequence[int]]:
        """The queue lengths and the prefill tokens, by place; as they are now, and not to be changed.

        They stand side by side: the loads of a large fleet are all over the memory, most in no cache of a processor.
        """
        if not self._places:
            self._gather()
        return self._lengths, self._prefill_tokens

    def shortest(self, rng: random.Random) -> int:
        """The place of a replica with the shortest queue, ties uniformly at random. There must be one at least.

        Where others choose as well, one of the short queues, see `draw_by_water_filling`.
        """
        if not self._places:
            self._gather()
        buckets, heap, coming = self._buckets, self._heap, self.unreported.requests
        if coming > 0:
            levels = [(length, count) for length in sorted(heap) if (count := len(buckets[length]))]
            bucket = buckets[levels[draw_by_water_filling(levels, coming, rng)][0]]
        else:
            while not (bucket := buckets[heap[0]]):
                del buckets[heappop(heap)]
        return bucket[int(rng.random() * len(bucket))]

    def changed(self, replica: R) -> None:
        """The queue length of a replica or its prefill tokens may have changed. Nothing to do if it is none of these.

        One that gets nothing new is none of them, and still ends what it has.
        """
        place = self._places.get(id(replica))
        if place is None:
            return
        length = replica.queue_length
        self._prefill_tokens[place] = load_of(replica).prefill_tokens
        before = self._lengths[place]
        if length != before:
            self._take(place, self._buckets[before])
            self._put(place, length)
            self._total += length - before

    def _gather(self) -> None:
        self._places = {id(replica): place for place, replica in enumerate(self)}
        self._prefill_tokens = array("q", [load_of(replica).prefill_tokens for replica in self])
        self._lengths = [0] * len(self)
        self._ranks = [0] * len(self)
        for place, replica in enumerate(self):
            self._put(place, replica.queue_length)
        self._total = sum(self._lengths)

    def _put(self, place: int, length: int) -> None:
        bucket = self._buckets.get(length)
        if bucket is None:
            bucket = self._buckets[length] = []
            heappush(self._heap, length)
        self._ranks[place] = len(bucket)
        self._lengths[place] = length
        bucket.append(place)

    def _take(self, place: int, bucket: list[int]) -> None:
        """Remove a place; the last of the bucket gets its rank."""
        last = bucket.pop()
        if last != place:
            rank = self._ranks[place]
            bucket[rank] = last
            self._ranks[last] = rank
