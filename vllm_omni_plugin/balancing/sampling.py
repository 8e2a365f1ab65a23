"""Compares a few replicas instead of all, so that the cost of a decision does not grow with the fleet."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.interface import ReplicaView
from vllm_omni_plugin.balancing.loads.serving_replicas import ServingReplicas, draw_by_water_filling

MOST_COMPARED = 8
"""Upper bound of the replicas for which a policy computes a score.

Source: the supermarket model (Mitzenmacher, 2001): with d samples, the share of queues with k requests or more falls
as load^((d^k - 1)/(d - 1)), so eight of many are nearly as good as all.
"""

_BESIDE_THE_SHORTEST = 3
"""Random replicas that are compared with the known shortest queue. More did not help in simulations of 16 and 64
replicas."""


def sample(count: int, total: int, rng: random.Random) -> Sequence[int]:
    """Up to `count` distinct random positions below `total`; for a few of many faster than `random.sample`."""
    if count >= total:
        return range(total)
    chosen: dict[int, None] = {}
    draw = rng.random
    while len(chosen) < count:
        chosen[int(draw() * total)] = None
    return list(chosen)


def positions_to_compare(replicas: Sequence[ReplicaView], rng: random.Random) -> list[int]:
    """Positions to compute scores for: all of up to eight; of more, a known shortest queue and three random ones."""
    total = len(replicas)
    if total <= MOST_COMPARED or not isinstance(replicas, ServingReplicas):
        return list(sample(MOST_COMPARED, total, rng))
    chosen, draw = [replicas.shortest(rng)], rng.random
    while len(chosen) <= _BESIDE_THE_SHORTEST:
        position = int(draw() * total)
        if position not in chosen:
            chosen.append(position)
    return chosen


def has_other_heads(replicas: Sequence[ReplicaView]) -> bool:
    return isinstance(replicas, ServingReplicas) and replicas.unreported.heads > 1


def expected_arrivals(replicas: Sequence[ReplicaView], compared: int) -> float:
    """Estimated unreported requests of other heads to `compared` of these replicas; 0.0 without other heads."""
    if not isinstance(replicas, ServingReplicas):
        return 0.0
    return replicas.unreported.requests * compared / len(replicas)


def pick_lowest(scores: Sequence[float], rng: random.Random, arrivals: float = 0.0) -> int:
    """Index of the lowest score, ties uniformly at random; with `arrivals` see `draw_by_water_filling`."""
    if arrivals > 0:
        order = sorted(range(len(scores)), key=scores.__getitem__)
        return order[draw_by_water_filling([(scores[place], 1) for place in order], arrivals, rng)]
    best = min(scores)
    if scores.count(best) == 1:
        return scores.index(best)
    return rng.choice([place for place, score in enumerate(scores) if score == best])
