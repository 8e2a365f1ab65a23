"""The block index and the estimated caches, against simple models."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing.caches.prefix_caches import BlockIndex, PrefixCaches
from vllm_omni_plugin.balancing.caches.replica_bits import ReplicaBits, sample_bits

from .fakes import with_queues

BITS = [0, 1, 5, 63, 64, 1023]
# Chained like block keys: a key depends on all previous letters.
WORDS = st.text("ab", min_size=1, max_size=6)


def chain(word: str) -> list[int]:
    return [int(f"1{word[:end].translate(str.maketrans('ab', '01'))}", 2) for end in range(1, len(word) + 1)]


def matches(caches: BlockIndex | PrefixCaches, keys: Sequence[int]) -> dict[int, int]:
    """Leading blocks by replica."""
    return {bit: blocks for blocks, holders in caches.levels(keys) for bit in BITS if holders >> bit & 1}


def leading(held: Sequence[int] | set[int], keys: Sequence[int]) -> int:
    return next((place for place, key in enumerate(keys) if key not in held), len(keys))


@given(st.lists(st.tuples(st.sampled_from(BITS), WORDS, st.integers(0, 6)), max_size=40), WORDS)
def test_the_index_matches_one_set_per_replica(changes: list[tuple[int, str, int]], prompt: str) -> None:
    index, sets = BlockIndex(), {bit: set[int]() for bit in BITS}
    for bit, word, kept in changes:
        held, keys = sets[bit], chain(word)
        assert set(index.store(bit, keys)) == set(keys) - held
        # Engines evict a block together with all later ones.
        gone = {key for key in held | set(keys) if any(key >> up in keys[kept:] for up in range(7))}
        index.remove(bit, sorted(gone))
        sets[bit] = (held | set(keys)) - gone
        expected = {bit: leading(held, chain(prompt)) for bit, held in sets.items()}
        assert matches(index, chain(prompt)) == {bit: blocks for bit, blocks in expected.items() if blocks}
        assert all(index.has(bit, key) == (key in held) for bit, held in sets.items() for key in chain(prompt))


def test_levels_name_all_holders_of_each_length_shortest_first() -> None:
    index = BlockIndex()
    for bit, blocks in ((0, 3), (3, 2), (2, 2)):
        index.store(bit, [1, 2, 3][:blocks])
    assert index.levels([1, 2, 3, 4]) == [(2, 0b1101), (3, 0b1)]


class SlowCache:
    """A simple model of one replica's cache, block by block."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.by_age: list[int] = []

    def use(self, keys: list[int]) -> None:
        keys = keys[: self._capacity]
        self.by_age = [key for key in self.by_age if key not in keys] + keys[::-1]
        self.by_age = self.by_age[max(0, len(self.by_age) - self._capacity) :]


@given(st.lists(st.tuples(st.sampled_from([0, 1, 5]), WORDS), max_size=60), st.integers(1, 12), WORDS)
def test_estimated_caches_evict_like_a_list_of_blocks(uses: list[tuple[int, str]], capacity: int, prompt: str) -> None:
    caches, slow = PrefixCaches(), {bit: SlowCache(capacity) for bit in (0, 1, 5)}
    for bit, word in uses:
        caches.estimate(bit, chain(word), capacity)
        slow[bit].use(chain(word))
        expected = {bit: leading(cache.by_age, chain(prompt)) for bit, cache in slow.items()}
        assert matches(caches, chain(prompt)) == {bit: blocks for bit, blocks in expected.items() if blocks}


@given(st.lists(WORDS, max_size=10), WORDS, st.lists(WORDS, max_size=3), WORDS)
def test_undoing_a_prompt_keeps_older_blocks_and_those_of_later_prompts(
    before: list[str], withdrawn: str, after: list[str], prompt: str
) -> None:
    caches = PrefixCaches()
    for word in before:
        caches.estimate(0, chain(word), 100)
    known = matches(caches, chain(withdrawn)).get(0, 0)
    caches.estimate(0, chain(withdrawn), 100)
    for word in after:
        caches.estimate(0, chain(word), 100)
    caches.undo_estimate(0, chain(withdrawn), known)
    held = {key for word in (*before, *after) for key in chain(word)}
    # A prompt with the same blocks cannot be distinguished from the undone one.
    if not any(word.startswith(withdrawn) or withdrawn.startswith(word) for word in after):
        assert matches(caches, chain(prompt)).get(0, 0) == leading(held, chain(prompt))


def test_sampled_bits_are_distinct_and_cover_the_mask() -> None:
    rng, mask = random.Random(1), sum(1 << bit for bit in (0, 3, 4, 700))
    draws = [sample_bits(mask, 2, rng) for _ in range(200)]
    assert all(len(set(draw)) == 2 for draw in draws)
    assert set().union(*draws) == {0, 3, 4, 700}
    assert sorted(sample_bits(mask, 9, rng)) == [0, 3, 4, 700]


def test_a_list_changed_in_place_is_noticed() -> None:
    bits, replicas = ReplicaBits(), list(with_queues(0, 0))
    bits.fleet(replicas)
    replicas.reverse()
    assert bits.fleet(replicas).bits == [1, 0]
