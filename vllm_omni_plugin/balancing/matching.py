"""What the policies that look at caches have in common: whom to compare, and what to call the outcome."""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_omni_plugin.balancing.base import ReplicaView
from vllm_omni_plugin.balancing.decision import Candidate, Decision
from vllm_omni_plugin.balancing.load import load_of
from vllm_omni_plugin.balancing.prefix_index import some_slots_of
from vllm_omni_plugin.balancing.sampling import MOST_COMPARED, coming_to, few, lowest
from vllm_omni_plugin.balancing.serving import ServingReplicas
from vllm_omni_plugin.balancing.slots import Membership

_MOST_HOLDERS = 3
"""Replicas compared in a large fleet because they have the longest matches."""
_MOST_DELAYED = 4
"""Requests that a token to compute is charged for at most: a cold replica is worth warming while it is idle, and not
for ever too expensive once it is busy. Chosen with benchmarks/simulate.py; 2 and 8 were worse, no bound was worst."""

TokenLevels = Sequence[tuple[int, int]]
"""Tokens of a prompt, and the holders of at least so many as a mask of slots, longest match first."""


class Home(NamedTuple):
    """A replica that is expected to have something of a prompt because all heads send its like there.

    Attributes:
        position: its place in the fleet.
        tokens: how many of those that nobody is known to have.
    """

    position: int
    tokens: float


_ByPosition = Sequence[int] | Mapping[int, int]


def compare(
    replicas: Sequence[ReplicaView],
    positions: Sequence[int],
    slots: Sequence[int],
    levels: TokenLevels,
    tokens: float,
    answer_tokens: float,
    overlap_weight: float = 1.0,
    home: Home | None = None,
) -> tuple[list[float], list[int]]:
    """What each replica would add to the latency of all requests, in the time that one prompt token takes.

    That is `overlap_weight * (tokens - matched) * min(4, requests + 1) + prefill_tokens + answer_tokens * requests`.
    One loop for all, without a call per replica: this is much of what a decision costs.

    Args:
        replicas: of the fleet.
        positions: those to compare.
        slots: of all replicas, by position.
        levels: who has how much of the prompt.
        tokens: of the prompt.
        answer_tokens: what an answer costs each other one on the same replica.
        overlap_weight: what a token to compute costs.
        home: the prompt's, which is then among `positions`.

    Returns:
        The latencies, and how many tokens are known to match.
    """
    latencies: list[float] = []
    matches: list[int] = []
    lengths, prefill_tokens = replicas.work if isinstance(replicas, ServingReplicas) else _work(replicas, positions)
    for position in positions:
        slot, matched = slots[position], 0
        for level_tokens, holders in levels:
            if holders >> slot & 1:
                matched = level_tokens
                break
        requests = lengths[position]
        delayed = requests + 1 if requests < _MOST_DELAYED else _MOST_DELAYED
        to_compute = overlap_weight * (tokens - matched)
        latencies.append(to_compute * delayed + prefill_tokens[position] + answer_tokens * requests)
        matches.append(matched)
    if home is not None:
        delayed = min(lengths[home.position] + 1, _MOST_DELAYED)
        latencies[positions.index(home.position)] -= overlap_weight * home.tokens * delayed
    return latencies, matches


def _work(replicas: Sequence[ReplicaView], positions: Sequence[int]) -> tuple[_ByPosition, _ByPosition]:
    """Requests and prefill tokens, of replicas that nobody keeps them for side by side."""
    loads = {position: load_of(replicas[position]) for position in positions}
    requests = {position: load.requests for position, load in loads.items()}
    return requests, {position: load.prefill_tokens for position, load in loads.items()}


def coming_cost(
    replicas: Sequence[ReplicaView], matches: Sequence[int], home: Home | None, tokens: int, answer_tokens: float
) -> float:
    """What others probably add to the scores of those compared before anybody sees it, each as much as this prompt."""
    expected = 0.0 if home is None else home.tokens
    return coming_to(replicas, len(matches)) * (tokens - max(matches) - expected + answer_tokens)


def cheapest(scores: Sequence[float], matches: Sequence[int], rng: random.Random, coming: float = 0.0) -> int:
    """The place of the lowest score; of equal ones the longest match, ties of that uniformly at random.

    With something coming from other heads, see `lowest`.
    """
    if coming > 0:
        return lowest(scores, rng, coming)
    least = min(scores)
    if scores.count(least) == 1:
        return scores.index(least)
    places = [place for place, score in enumerate(scores) if score == least]
    longest = max([matches[place] for place in places])
    return rng.choice([place for place in places if matches[place] == longest])


def decision_for(
    place: int,
    positions: Sequence[int],
    scores: Sequence[float],
    matches: Sequence[int],
    fallback: str,
    home: Home | None = None,
) -> Decision:
    """The decision for the replica at a place of those compared.

    Its reason is `prefix`: nobody compared is known to have more of the prompt; `home`: it is the prompt's;
    `prefix-spilled`: one has more; `least-load`: nobody has any.
    """
    position, matched, longest = positions[place], matches[place], max(matches)
    reason = "least-load" if not longest else "prefix" if matched == longest else "prefix-spilled"
    if home is not None and position == home.position and reason != "prefix":
        reason = "home"
    return Decision(position, reason, tuple(map(Candidate, positions, scores, matches)), fallback, matched)


def positions_to_compare(
    replicas: Sequence[ReplicaView],
    members: Membership,
    levels: TokenLevels,
    rng: random.Random,
    home: Home | None = None,
) -> Sequence[int]:
    """All of a few replicas; of many, the home, those with the longest matches, a shortest queue, some at random."""
    positions = few(replicas, rng)
    if len(replicas) <= MOST_COMPARED:
        return positions
    if home is not None and home.position not in positions:
        positions.append(home.position)
    wanted, unseen = _MOST_HOLDERS, members.mask
    for _, holders in levels:
        for slot in some_slots_of(holders & unseen, wanted, rng):
            wanted -= 1
            position = members.positions[slot]
            if position not in positions:
                positions.append(position)
        if not wanted:
            break
        unseen &= ~holders
    return positions
