"""The replicas that take requests, and an estimate of what other heads send to them."""

import random
from collections.abc import Iterable, Sequence
from math import exp
from typing import TypeVar

from vllm_omni_plugin.balancing.interface import ReplicaView

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
    """The replicas as a pool passes them to its policy, with what other heads have not reported of them."""

    unreported: UnreportedRequests

    def __new__(cls, replicas: Iterable[R], unreported: UnreportedRequests | None = None) -> "ServingReplicas[R]":
        serving = super().__new__(cls, replicas)
        serving.unreported = unreported or UnreportedRequests()
        return serving
