"""Choosing by stale loads: what other heads have probably sent and not reported yet, and a rule that allows for it."""

import random
from collections.abc import Sequence
from math import exp

_AGE_S = 0.1
"""How old what other heads report may be. Chosen with benchmarks/spread.py; half of it was worse, more no better."""


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

    def share_with(self, heads: int) -> None:
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
