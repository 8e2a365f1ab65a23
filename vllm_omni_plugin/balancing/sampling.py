"""The replicas that a policy chooses from, and which of them it compares: a score costs more than a queue length."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp
from typing import TypeVar
from zlib import crc32

from vllm_omni_plugin.balancing.interface import ReplicaView
from vllm_omni_plugin.balancing.replica_load import load_of

_AGE_S = 0.1
"""Age of other heads' reports. Chosen in simulations: half of it was worse, more was no better."""
R = TypeVar("R", bound=ReplicaView)


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
    """The replicas as a pool passes them to its policy, with what other heads have not reported of them.

    The pool keeps `queue_lengths` up to date, by position: reading an attribute of 64 replicas in cold memory takes
    longer than all else that a policy like `least-queue-length` does.
    """

    unreported: UnreportedRequests
    queue_lengths: list[int]

    def __new__(cls, replicas: Iterable[R], unreported: UnreportedRequests | None = None) -> "ServingReplicas[R]":
        serving = super().__new__(cls, replicas)
        serving.unreported = unreported or UnreportedRequests()
        serving.queue_lengths = _queue_lengths(serving)
        return serving


def queue_lengths_of(replicas: Sequence[ReplicaView]) -> list[int]:
    """The queue lengths of these replicas by position; not to be changed."""
    return replicas.queue_lengths if isinstance(replicas, ServingReplicas) else _queue_lengths(replicas)


def _queue_lengths(replicas: Sequence[ReplicaView]) -> list[int]:
    return [replica.queue_length for replica in replicas]


MOST_COMPARED = 8
"""Upper bound of the replicas for which a policy computes a score.

Source: the supermarket model (Mitzenmacher, 2001): with d samples, the share of queues with k requests or more falls
as load^((d^k - 1)/(d - 1)), so eight of many are nearly as good as all.
"""

_MOST_SCANNED = 256
_BESIDE_THE_SHORTEST = 3
"""Random replicas that are compared with the shortest queue. More did not help in simulations of 16 and 64
replicas."""


_MOST_WITH_ADAPTER = 3
_SEARCHED_FOR_ADAPTER = 64
"""Neighbours at an adapter's own place, the same for all heads. More would cost more than the rest of a decision."""


def positions_to_compare(replicas: Sequence[ReplicaView], rng: random.Random, adapter: str = "") -> list[int]:
    """Positions to compute scores for: all of up to eight; of more, a shortest queue and three random ones.

    Of a request with a LoRA adapter, also the three with the shortest queues of those of 64 neighbours that have it
    loaded, or of all 64.
    """
    total = len(replicas)
    if total <= MOST_COMPARED:
        return list(range(total))
    lengths, draw = queue_lengths_of(replicas), rng.random
    chosen = [_short_queue(replicas, lengths, rng)]
    while len(chosen) <= _BESIDE_THE_SHORTEST:
        position = int(draw() * total)
        if position not in chosen:
            chosen.append(position)
    if adapter:
        first = crc32(adapter.encode())
        near = [(first + step) % total for step in range(min(total, _SEARCHED_FOR_ADAPTER))]
        have = [position for position in near if load_of(replicas[position]).adapters.has(adapter)] or near
        have.sort(key=lengths.__getitem__)
        chosen += [position for position in have[:_MOST_WITH_ADAPTER] if position not in chosen]
    return chosen


def _short_queue(replicas: Sequence[ReplicaView], lengths: list[int], rng: random.Random) -> int:
    """Position of a shortest queue of up to 256 replicas, of more of 256 neighbours at random; see `pick_lowest`."""
    total, start = len(lengths), 0
    if total > _MOST_SCANNED:
        start = int(rng.random() * total)
        lengths = lengths[start : start + _MOST_SCANNED] + lengths[: max(0, start + _MOST_SCANNED - total)]
    return (start + pick_lowest(lengths, rng, expected_arrivals(replicas, len(lengths)))) % total


def has_other_heads(replicas: Sequence[ReplicaView]) -> bool:
    return isinstance(replicas, ServingReplicas) and replicas.unreported.heads > 1


def expected_arrivals(replicas: Sequence[ReplicaView], compared: int) -> float:
    """Estimated unreported requests of other heads to `compared` of these replicas; 0.0 without other heads."""
    if not isinstance(replicas, ServingReplicas):
        return 0.0
    return replicas.unreported.requests * compared / len(replicas)


def pick_lowest(scores: Sequence[float], rng: random.Random, arrivals: float = 0.0) -> int:
    """Index of the lowest score, ties uniformly at random; with `arrivals` see `draw_by_water_filling`."""
    best = min(scores)
    if arrivals > 0:
        levels = sorted(Counter(scores).items())
        best = levels[draw_by_water_filling(levels, arrivals, rng)][0]
    ties, place = scores.count(best), scores.index(best)
    if ties > 1:
        for _ in range(int(rng.random() * ties)):
            place = scores.index(best, place + 1)
    return place
