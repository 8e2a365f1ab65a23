"""What the policies that look at caches have in common: whom to compare, and what to call the outcome."""

import random
from collections.abc import Sequence

from vllm_omni_plugin.balancing.base import ReplicaView
from vllm_omni_plugin.balancing.decision import Candidate
from vllm_omni_plugin.balancing.load import load_of
from vllm_omni_plugin.balancing.prefix_index import some_slots_of
from vllm_omni_plugin.balancing.sampling import MOST_COMPARED, few
from vllm_omni_plugin.balancing.slots import Membership

_MOST_HOLDERS = 3
"""Replicas compared in a large fleet because they have the longest matches."""
_MOST_DELAYED = 4
"""Requests that a token to compute is charged for at most: a cold replica is worth warming while it is idle, and not
for ever too expensive once it is busy. Chosen with benchmarks/simulate.py; 2 and 8 were worse, no bound was worst."""

TokenLevels = Sequence[tuple[int, int]]
"""Tokens of a prompt, and the holders of at least so many as a mask of slots, longest match first."""


def candidates_by_latency(
    replicas: Sequence[ReplicaView],
    positions: Sequence[int],
    slots: Sequence[int],
    levels: TokenLevels,
    tokens: float,
    answer_tokens: float,
    overlap_weight: float = 1.0,
) -> tuple[Candidate, ...]:
    """What each replica would add to the latency of all requests, in the time that one prompt token takes.

    That is `overlap_weight * (tokens - matched) * min(4, requests + 1) + prefill_tokens + answer_tokens * requests`.
    One loop for all, without a call per replica but for its load: this is most of what a decision costs.

    Args:
        replicas: of the fleet.
        positions: those to compare.
        slots: of all replicas, by position.
        levels: who has how much of the prompt.
        tokens: of the prompt.
        answer_tokens: what an answer costs each other one on the same replica.
        overlap_weight: what a token to compute costs.
    """
    scores: list[float] = []
    matches: list[int] = []
    for position in positions:
        slot, matched = slots[position], 0
        for level_tokens, holders in levels:
            if holders >> slot & 1:
                matched = level_tokens
                break
        load = load_of(replicas[position])
        requests = load.requests
        delayed = requests + 1 if requests < _MOST_DELAYED else _MOST_DELAYED
        to_compute = overlap_weight * (tokens - matched)
        scores.append(to_compute * delayed + load.prefill_tokens + answer_tokens * requests)
        matches.append(matched)
    return tuple(map(Candidate, positions, scores, matches))


def cheapest(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The lowest score; of equal ones the longest match, ties of that uniformly at random."""
    scores = [candidate.score for candidate in candidates]
    lowest = min(scores)
    if scores.count(lowest) == 1:
        return candidates[scores.index(lowest)]
    return longest_match([candidate for candidate in candidates if candidate.score == lowest], rng)


def positions_to_compare(
    replicas: Sequence[ReplicaView], members: Membership, levels: TokenLevels, rng: random.Random
) -> Sequence[int]:
    """All of a few replicas; of many, those with the longest matches, a shortest queue, and some at random."""
    sampled = few(replicas, rng)
    if len(replicas) <= MOST_COMPARED:
        return sampled
    positions = set(sampled)
    wanted, seen = _MOST_HOLDERS, 0
    for _, holders in levels:
        found = some_slots_of(holders & ~seen, wanted, rng)
        positions.update([members.positions[slot] for slot in found])
        wanted -= len(found)
        if not wanted:
            break
        seen |= holders
    return list(positions)


def longest_match(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Of equal candidates one that has most of the prompt, ties uniformly at random."""
    if len(candidates) == 1:
        return candidates[0]
    longest = max([candidate.matched_tokens for candidate in candidates])
    return rng.choice([candidate for candidate in candidates if candidate.matched_tokens == longest])


def reason_of(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """`prefix`: nobody compared has more of the prompt; `prefix-spilled`: one has; `least-load`: nobody has any."""
    longest = max([candidate.matched_tokens for candidate in candidates])
    if not longest:
        return "least-load"
    return "prefix" if chosen.matched_tokens == longest else "prefix-spilled"
