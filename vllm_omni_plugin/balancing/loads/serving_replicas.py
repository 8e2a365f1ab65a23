"""The replicas that take requests, indexed by queue length, and an estimate of what other heads send to them."""

import random
from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import exp
from typing import Protocol, TypeVar

from vllm_omni_plugin.balancing.interface import ReplicaView
from vllm_omni_plugin.balancing.loads.context_cost import ContextLoad, context_cost
from vllm_omni_plugin.balancing.loads.replica_load import load_of

_AGE_S = 0.1
"""Age of other heads' reports. Chosen in simulations: half of it was worse, more was no better."""
R = TypeVar("R", bound=ReplicaView)


class CountedLoad(ContextLoad, Protocol):
    """What is indexed of a load: a `ReplicaLoad`, or the sums that one is made of."""

    @property
    def requests(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...


def work_of(load: CountedLoad) -> float:
    """What a replica has to do before a new prompt, and what slows it down, in prompt tokens."""
    return load.prefill_tokens + context_cost(load)


class UnreportedRequests:
    """Estimates how many `requests` other heads have sent to one stage and not reported yet.

    Other heads are assumed to send as many requests as this one, in proportion to what each has in flight. `heads`
    includes this head. The pool sets `in_flight`, the unfinished requests of this head.
    """

    def __init__(self) -> None:
        self.heads = 1
        self.requests = 0.0
        self.in_flight = 0
        self._recent = 0.0
        self._as_of = 0.0

    def set_heads(self, heads: int) -> None:
        self.heads = heads
        self.requests = 0.0

    def estimate(self, now: float, in_flight: int) -> None:
        """Update `requests` for a new request; `in_flight`: known unfinished requests of all heads."""
        self._recent *= exp((self._as_of - now) / _AGE_S)
        self._as_of = now
        others = max(0, in_flight - self.in_flight)
        # One more request for each head, so that a head with none in flight counts.
        self.requests = self._recent * (others + self.heads - 1) / (self.in_flight + 1)
        self._recent += 1.0


def draw_by_water_filling(levels: Sequence[tuple[float, int]], arrivals: float, rng: random.Random) -> int:
    """Draw the index of a level so that the expected arrivals of all heads fill the lowest levels evenly.

    Each level (height and number of places, lowest first) is drawn with a probability proportional to its distance from
    the common height that all `arrivals` would fill. If every head took the lowest level, all would choose the same
    replica.

    Source: Dahlin, "Interpreting Stale Load Information" (2000); for many concurrent dispatchers Goren, Vargaftik and
    Moses, "Distributed Dispatching in the Parallel Server Model" (2020).
    """
    count, sum_of_levels, reached = 0, 0.0, 0
    for level, places in levels:
        if count * level - sum_of_levels >= arrivals:
            break
        count += places
        sum_of_levels += places * level
        reached += 1
    height = (sum_of_levels + arrivals) / count
    rest = rng.random() * arrivals
    for index in range(reached):
        level, places = levels[index]
        rest -= places * (height - level)
        if rest < 0:
            return index
    return 0


class ServingReplicas(tuple[R, ...]):
    """A tuple of replicas with an index of their queue lengths and work. Its owner calls `update`.

    A change of membership needs a new object. The first use builds the index in O(n). After that a change of one
    replica and a query are O(1), except for a heap of the distinct queue lengths.
    """

    def __new__(cls, replicas: Iterable[R], unreported: UnreportedRequests | None = None) -> "ServingReplicas[R]":
        return super().__new__(cls, replicas)

    def __init__(self, replicas: Iterable[R], unreported: UnreportedRequests | None = None) -> None:
        self.unreported = unreported or UnreportedRequests()
        # By place; empty until the first use.
        self._lengths: list[int] = []
        self._work = array("d")
        self._total = 0
        self._places: dict[int, int] = {}
        # Places by queue length, and the index of each place in its bucket.
        self._buckets: dict[int, list[int]] = {}
        self._ranks: list[int] = []
        # All lengths that have a bucket, including empty ones.
        self._heap: list[int] = []

    @property
    def total_queue_length(self) -> int:
        if not self._places:
            self._gather()
        return self._total

    @property
    def work(self) -> tuple[Sequence[int], Sequence[float]]:
        """The current queue lengths, and the work beside the prompts to come, by place; read-only. See `work_of`."""
        if not self._places:
            self._gather()
        return self._lengths, self._work

    def shortest(self, rng: random.Random) -> int:
        """The place of a shortest queue, ties at random; with other heads see `draw_by_water_filling`."""
        if not self._places:
            self._gather()
        buckets, heap, arrivals = self._buckets, self._heap, self.unreported.requests
        if arrivals > 0:
            levels = [(length, count) for length in sorted(heap) if (count := len(buckets[length]))]
            bucket = buckets[levels[draw_by_water_filling(levels, arrivals, rng)][0]]
        else:
            while not (bucket := buckets[heap[0]]):
                del buckets[heappop(heap)]
        return bucket[int(rng.random() * len(bucket))]

    def update(self, replica: R, load: CountedLoad) -> None:
        """A replica's load has changed. Replicas that are not in this tuple, such as draining ones, are ignored."""
        place = self._places.get(id(replica))
        if place is None:
            return
        self._work[place] = work_of(load)
        queue_length, before = load.requests, self._lengths[place]
        if queue_length != before:
            bucket = self._buckets[before]
            # The last place of the bucket gets the rank of the removed one.
            last = bucket.pop()
            if last != place:
                rank = self._ranks[place]
                bucket[rank] = last
                self._ranks[last] = rank
            self._put(place, queue_length)
            self._total += queue_length - before

    def _gather(self) -> None:
        self._places = {id(replica): place for place, replica in enumerate(self)}
        self._work = array("d", [work_of(load_of(replica)) for replica in self])
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
