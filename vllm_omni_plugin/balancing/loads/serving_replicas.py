"""The replicas that take requests, with what is known of all of them at once, and what other heads add to that."""

import random
from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import exp
from typing import TypeVar

from vllm_omni_plugin.balancing.interface import ReplicaView
from vllm_omni_plugin.balancing.loads.replica_load import load_of

_AGE_S = 0.1
"""How old what other heads report may be. Chosen with benchmarks/spread.py; half of it was worse, more no better."""
R = TypeVar("R", bound=ReplicaView)


class UnreportedRequests:
    """An estimate for the replicas of one stage.

    The other heads are taken to send as much as this one, in proportion of what each has in flight: one that stands by
    sends nothing.

    Attributes:
        heads: how many balance over these replicas, this one included.
        requests: that the others have sent and not reported; 0.0 for a head that is alone.
        in_flight: unfinished requests of this head, which the pool counts.
    """

    def __init__(self) -> None:
        self.heads = 1
        self.requests = 0.0
        self.in_flight = 0
        self._recent = 0.0
        self._as_of = 0.0

    def set_heads(self, heads: int) -> None:
        """So many heads balance from now on."""
        self.heads = heads
        self.requests = 0.0

    def estimate(self, now: float, in_flight: int) -> None:
        """Bring `requests` up to date for one request more of this head, which counts from the next one on.

        Args:
            now: monotonic seconds.
            in_flight: unfinished requests of all heads, as far as this one knows.
        """
        self._recent *= exp((self._as_of - now) / _AGE_S)
        self._as_of = now
        others = max(0, in_flight - self.in_flight)
        # As if every head had one more, which stands for those that have nothing in flight yet.
        self.requests = self._recent * (others + self.heads - 1) / (self.in_flight + 1)
        self._recent += 1.0


def draw_by_water_filling(levels: Sequence[tuple[float, int]], coming: float, rng: random.Random) -> int:
    """The index of a level, drawn such that what is coming fills up the lowest to one height, as water would.

    Whoever takes the lowest of what all see takes the same as all others. Here each level is drawn in proportion to
    what it lacks to that height, so that all together, each by this rule and without a word, do on average what one
    alone would have done.

    Source: Dahlin, "Interpreting Stale Load Information" (2000); for many who choose at once, Goren, Vargaftik and
    Moses, "Distributed Dispatching in the Parallel Server Model" (2020).

    Args:
        levels: how high and how many, lowest first; one at least.
        coming: what all of them will add, in the unit of the levels; above 0.
        rng: source of randomness.
    """
    count, sum_of_levels, reached = 0, 0.0, 0
    for level, places in levels:
        if count * level - sum_of_levels >= coming:
            break
        count += places
        sum_of_levels += places * level
        reached += 1
    height = (sum_of_levels + coming) / count
    rest = rng.random() * coming
    for index in range(reached):
        level, places = levels[index]
        rest -= places * (height - level)
        if rest < 0:
            return index
    return 0


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
