"""Block keys differ exactly where vLLM's prefix cache differs; index and estimated caches follow simple models."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing import CacheChange, MediaSpan, Prompt
from vllm_omni_plugin.balancing.caches.block_keys import answered_keys, block_key, pack_tokens, prompt_keys
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


def test_a_replica_that_reports_more_blocks_than_it_has_is_estimated_until_its_next_restart() -> None:
    """Whoever has the secret could fill the memory of all heads otherwise."""
    caches, made_up = PrefixCaches(), range(1, 20_001)
    caches.change(0, CacheChange(restart=True), 1000)
    for begin in range(0, len(made_up), 1000):
        caches.change(0, CacheChange(made_up[begin : begin + 1000]), 1000)
        assert sum(bool(matches(caches, [key])) for key in made_up) < 8000
    assert caches.reporting == 0
    caches.estimate(0, chain("aba"), 1000)
    assert matches(caches, chain("aba")) == {0: 3}
    caches.change(0, CacheChange(chain("ab"), restart=True), 1000)
    assert (matches(caches, chain("aba")), caches.reporting) == ({0: 2}, 1)


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


TOKENS = list(range(100, 140))


def test_every_full_block_but_the_last_token_has_a_key() -> None:
    counts = [len(prompt_keys(Prompt(TOKENS[:length]), 8)) for length in (0, 1, 8, 9, 16, 17, 40)]
    assert counts == [0, 0, 0, 1, 1, 2, 4]


def test_keys_chain_the_tokens_of_blocks() -> None:
    first = block_key(0, pack_tokens(TOKENS[:16]))
    second = block_key(first, pack_tokens(TOKENS[16:32]))
    assert prompt_keys(Prompt(TOKENS), 16) == [first, second]


def test_a_token_changes_its_block_and_all_later_ones() -> None:
    other = [*TOKENS[:10], 1, *TOKENS[11:]]
    same = [a == b for a, b in zip(prompt_keys(Prompt(TOKENS), 8), prompt_keys(Prompt(other), 8), strict=True)]
    assert same == [True, False, False, False]


@pytest.mark.parametrize(
    "other",
    [
        Prompt(TOKENS, lora_name="sql"),
        Prompt(TOKENS, cache_salt="tenant-1"),
        Prompt(TOKENS, lora_name="sql", cache_salt="tenant-1"),
        Prompt(TOKENS, media=(MediaSpan("a-cat", 2, 4),)),
        Prompt(TOKENS, media=(MediaSpan("a-dog", 2, 4),)),
        Prompt(TOKENS, media=(MediaSpan("a-cat", 3, 4),)),
    ],
    ids=["lora", "salt", "lora-and-salt", "image", "another-image", "image-elsewhere"],
)
def test_adapter_salt_and_media_change_all_blocks(other: Prompt) -> None:
    plain = Prompt(TOKENS)
    assert not set(prompt_keys(plain, 8)) & set(prompt_keys(other, 8))


def test_an_image_changes_its_block_and_all_later_ones() -> None:
    keys = prompt_keys(Prompt(TOKENS), 8)
    with_image = prompt_keys(Prompt(TOKENS, media=(MediaSpan("a-cat", 17, 4),)), 8)
    assert [a == b for a, b in zip(keys, with_image, strict=True)] == [True, True, False, False]


def test_a_prompt_that_cannot_use_the_cache_has_no_keys() -> None:
    assert prompt_keys(Prompt(TOKENS, cacheable=False), 8) == []
    assert answered_keys(Prompt(TOKENS, cacheable=False), [1, 2], 8) == []


@pytest.mark.parametrize("media", [(), (MediaSpan("a-cat", 17, 4),), (MediaSpan("a-cat", 17, 14),)])
@pytest.mark.parametrize("length", [1, 8, 9, 20, 39])
def test_the_keys_of_an_answer_are_those_of_the_next_turn(length: int, media: tuple[MediaSpan, ...]) -> None:
    prompt = Prompt(TOKENS[:length], lora_name="sql", media=media)
    next_turn = Prompt(TOKENS, lora_name="sql", media=media)
    assert answered_keys(prompt, TOKENS[length:], 8) == prompt_keys(next_turn, 8)
    assert prompt_keys(prompt, 8) == prompt_keys(next_turn, 8)[: (length - 1) // 8]
