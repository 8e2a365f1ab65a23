"""The shared index answers as one set of blocks for each slot would."""

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing.prefix_index import BlockHolders, PrefixIndex, slots_of, some_slots_of

SLOTS = st.sampled_from([0, 1, 5, 63, 64, 1023])
KEYS = st.lists(st.integers(1, 12), max_size=8)
CHANGES = st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), SLOTS, KEYS), max_size=40)


def leading(held: set[int], keys: list[int]) -> int:
    return next((place for place, key in enumerate(keys) if key not in held), len(keys))


@given(CHANGES, KEYS)
def test_index_matches_as_a_set_for_each_slot(changes: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    index, sets = PrefixIndex(), dict[int, set[int]]()
    for change, slot, keys in changes:
        held = sets.setdefault(slot, set())
        if change == "store":
            index.store(slot, keys)
            held |= set(keys)
        elif change == "remove":
            index.remove(slot, keys)
            held -= set(keys)
        else:
            index.clear(slot)
            held.clear()
    expected = {slot: leading(held, prompt) for slot, held in sets.items()}
    assert index.matches(prompt) == {slot: blocks for slot, blocks in expected.items() if blocks}
    assert {slot: index.blocks(slot) for slot in sets} == {slot: len(held) for slot, held in sets.items()}
    assert len(index) == len(set().union(*sets.values()))


def test_levels_name_all_holders_of_each_length_shortest_first() -> None:
    index = PrefixIndex()
    index.store(0, [1, 2, 3])
    index.store(3, [1, 2])
    index.store(2, [1, 2])
    assert index.levels([1, 2, 3, 4]) == [(2, 0b1101), (3, 0b1)]


def test_a_hole_ends_the_match_of_who_has_it_and_of_nobody_else() -> None:
    index = PrefixIndex()
    index.store(0, [1, 2, 3])
    index.store(1, [1, 2, 3])
    index.remove(0, [2])
    assert index.matches([1, 2, 3]) == {0: 1, 1: 3}


def test_a_slot_that_was_cleared_begins_with_nothing() -> None:
    index = PrefixIndex()
    index.store(4, [1, 2])
    index.clear(4)
    index.store(4, [2])
    assert index.matches([1, 2]) == {}
    assert index.blocks(4) == 1


def test_a_slot_can_be_cleared_after_long_churn() -> None:
    index = PrefixIndex()
    for key in range(1, 10_000):
        index.store(7, [key])
        index.remove(7, [key - 2])
    assert index.blocks(7) == 2
    index.clear(7)
    assert len(index) == 0


def test_the_holders_of_a_prefix_are_found_by_walk_and_by_search_alike() -> None:
    rng = random.Random(1)
    prompt = list(range(1, 200))
    index = PrefixIndex()
    for slot in range(100):
        index.store(slot, prompt[: rng.randrange(0, 200, rng.choice([1, 50]))])
    for length in range(len(prompt) + 1):
        asked = [*prompt[:length], *range(1000, 1010)]
        assert index.closed_levels(asked) == index.levels(asked)
        assert index.closed_levels(prompt[:length]) == index.levels(prompt[:length])


def test_the_holders_are_found_by_search_however_they_changed_since_the_last_one() -> None:
    rng = random.Random(1)
    # Branches of one tree: each prompt shares some beginning with another, and every slot holds beginnings.
    prompts = [[*range(1, 41)], [*range(1, 21), *range(100, 130)], [*range(1, 21), *range(100, 105), *range(200, 220)]]
    index, held = BlockHolders(), dict[tuple[int, int], int]()
    for _ in range(2000):
        slot, branch = rng.randrange(4), rng.randrange(3)
        # A slot has blocks of one branch only, so that what it gives up is no beginning of what it keeps.
        slot += 4 * branch
        prompt, before = prompts[branch], held.get((slot, branch), 0)
        after = rng.randrange(len(prompt) + 1)
        index.store(slot, prompt[before:after])
        index.remove(slot, prompt[after:before])
        held[slot, branch] = after
        for asked in prompts:
            asked = asked[: rng.randrange(len(asked) + 1)]
            assert index.closed_levels(asked) == index.levels(asked)


def test_slots_are_the_bits_of_a_mask() -> None:
    assert slots_of(1 << 1023 | 0b101) == [0, 2, 1023]
    assert slots_of(0) == []


def test_some_slots_are_distinct_holders_and_all_of_them_in_time() -> None:
    rng, mask = random.Random(1), sum(1 << slot for slot in (0, 3, 4, 700))
    draws = [some_slots_of(mask, 2, rng) for _ in range(200)]
    assert all(len(set(draw)) == 2 for draw in draws)
    assert set().union(*draws) == {0, 3, 4, 700}
    assert sorted(some_slots_of(mask, 9, rng)) == [0, 3, 4, 700]
