"""Compares a few replicas instead of all, so that the cost of a decision does not grow with the fleet."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.interface import ReplicaView
from vllm_omni_plugin.balancing.loads.serving_replicas import ServingReplicas, draw_by_water_filling

MOST_COMPARED = 8
"""Replicas that a policy compares at most where each comparison takes a computation.

Source: the supermarket model (Mitzenmacher, 2001): with d sampled, the share of queues of k requests or more
falls as load^((d^k - 1)/(d - 1)); eight of many are nearly as good as all.
"""

_BESIDE_THE_SHORTEST = 3
"""Replicas that are drawn where the shortest queue is known and compared as well. More gain nothing then, in
simulations of 16 and 64 replicas."""


def sample(count: int, total: int, rng: random.Random) -> Sequence[int]:
    """Distinct positions below `total`, uniformly at random; all of them, in order, if there are no more than `count`.

    Made for few of many: it draws again what it has drawn before, and is then faster than `random.sample`.
    """
    if count >= total:
        return range(total)
    chosen: dict[int, None] = {}
    draw = rng.random
    while len(chosen) < count:
        chosen[int(draw() * total)] = None
    return list(chosen)


def positions_to_compare(replicas: Sequence[ReplicaView], rng: random.Random) -> list[int]:
    """Distinct positions of replicas worth a computation: all of up to eight; of more, eight at random.

    Where the fleet knows its shortest queue, that and three others at random: an idle replica is never overlooked then.
    """
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
    """Whether other heads balance over these replicas, too."""
    return isinstance(replicas, ServingReplicas) and replicas.unreported.heads > 1


def expected_arrivals(replicas: Sequence[ReplicaView], compared: int) -> float:
    """Requests that other heads have probably sent to so many of these replicas without a word; 0.0 without others."""
    if not isinstance(replicas, ServingReplicas):
        return 0.0
    return replicas.unreported.requests * compared / len(replicas)


def pick_lowest(scores: Sequence[float], rng: random.Random, coming: float = 0.0) -> int:
    """The place of the lowest score, ties uniformly at random; of a low one where other heads choose as well.

    Args:
        scores: of those compared.
        rng: source of randomness.
        coming: what others probably add to all these scores before anybody sees it, see `draw_by_water_filling`.

    Raises:
        ValueError: there is none.
    """
    if coming > 0:
        order = sorted(range(len(scores)), key=scores.__getitem__)
        return order[draw_by_water_filling([(scores[place], 1) for place in order], coming, rng)]
    best = min(scores)
    if scores.count(best) == 1:
        return scores.index(best)
    return rng.choice([place for place, score in enumerate(scores) if score == best])
