"""The approximate caches evict as an engine does: what was used longest ago, and of a prompt the end first."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing.approximate_cache import ApproximateCaches

# Chains as block keys are: a key names all that is before it.
WORDS = st.text("ab", min_size=1, max_size=6)
USES = st.lists(st.tuples(st.integers(0, 2), WORDS), max_size=60)


def chain(word: str) -> list[int]:
    return [int(f"1{word[:end].translate(str.maketrans('ab', '01'))}", 2) for end in range(1, len(word) + 1)]


class SlowCache:
    """One replica's cache, block by block: used and freed as vLLM does, without a shortcut."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.by_age: list[int] = []

    def use(self, keys: list[int]) -> None:
        """Free the blocks of a prompt last one first, so that the first is the youngest."""
        keys = keys[: self._capacity]
        self.by_age = [key for key in self.by_age if key not in keys] + keys[::-1]
        self.by_age = self.by_age[max(0, len(self.by_age) - self._capacity) :]

    def match(self, keys: list[int]) -> int:
        """Leading blocks it has."""
        return next((place for place, key in enumerate(keys) if key not in self.by_age), len(keys))


@given(USES, st.integers(1, 12), WORDS)
def test_caches_match_and_evict_as_lists_of_blocks_do(uses: list[tuple[int, str]], capacity: int, prompt: str) -> None:
    caches, slow = ApproximateCaches(), [SlowCache(capacity) for _ in range(3)]
    for slot, word in uses:
        caches.use(slot, chain(word), capacity)
        slow[slot].use(chain(word))
        matches = {slot: cache.match(chain(prompt)) for slot, cache in enumerate(slow)}
        assert caches.matches(chain(prompt)) == {slot: blocks for slot, blocks in matches.items() if blocks}
        assert [caches.blocks(slot) for slot in range(3)] == [len(cache.by_age) for cache in slow]


@given(st.lists(st.one_of(WORDS, st.sampled_from(["hide", "show", "clear"])), max_size=60), st.integers(1, 12), WORDS)
def test_a_replica_shown_again_has_what_it_would_have_had(steps: list[str], capacity: int, prompt: str) -> None:
    caches, always_shown = ApproximateCaches(), ApproximateCaches()
    for each in (caches, always_shown):
        each.use(1, chain("abab"), capacity)
    hidden = False
    for step in steps:
        match step:
            case "hide" | "show":
                hidden = step == "hide"
                getattr(caches, step)(0)
            case "clear":
                caches.clear(0)
                always_shown.clear(0)
            case _:
                caches.use(0, chain(step), capacity)
                always_shown.use(0, chain(step), capacity)
        matches = always_shown.matches(chain(prompt))
        assert caches.matches(chain(prompt)) == {slot: blocks for slot, blocks in matches.items() if slot or not hidden}
        assert caches.blocks(0) == always_shown.blocks(0)
    caches.show(0)
    assert caches.matches(chain(prompt)) == always_shown.matches(chain(prompt))


def test_a_full_cache_loses_the_end_of_its_oldest_prompt() -> None:
    caches = ApproximateCaches()
    caches.use(0, [1, 2, 3], 5)
    caches.use(0, [7, 8, 9], 5)
    assert caches.matches([1, 2, 3]) == {0: 2}
    assert caches.matches([7, 8, 9]) == {0: 3}


def test_what_is_used_again_is_young_again() -> None:
    caches = ApproximateCaches()
    caches.use(0, [1, 2], 4)
    caches.use(0, [7, 8], 4)
    caches.use(0, [1, 2], 4)
    caches.use(0, [5], 4)
    assert (caches.matches([1, 2]), caches.matches([7, 8])) == ({0: 2}, {0: 1})


def test_a_shared_beginning_stays_with_the_youngest_prompt() -> None:
    caches = ApproximateCaches()
    caches.use(0, [1, 2, 3, 4], 6)
    caches.use(0, [1, 2, 8, 9], 6)
    caches.use(0, [5, 6], 6)
    assert caches.matches([1, 2, 3, 4]) == {0: 2}
    assert caches.matches([1, 2, 8, 9]) == {0: 4}


def test_a_prompt_longer_than_the_memory_keeps_its_beginning() -> None:
    caches = ApproximateCaches()
    caches.use(0, [1, 2, 3, 4], 3)
    assert caches.matches([1, 2, 3, 4]) == {0: 3}


def test_replicas_evict_each_by_itself() -> None:
    caches = ApproximateCaches()
    caches.use(0, [1, 2], 2)
    caches.use(1, [1, 2], 8)
    caches.use(0, [7], 2)
    assert caches.matches([1, 2]) == {0: 1, 1: 2}


def test_a_cleared_replica_leaves_those_of_others() -> None:
    caches = ApproximateCaches()
    caches.use(0, [1, 2], 8)
    caches.use(1, [1], 8)
    caches.clear(0)
    caches.clear(2)
    assert caches.matches([1, 2]) == {1: 1}
    assert caches.blocks(0) == 0


def test_the_same_prompt_for_ever_is_one_prompt() -> None:
    caches = ApproximateCaches()
    for _ in range(1000):
        caches.use(0, [1, 2, 3], 8)
    caches.use(0, [4], 8)
    assert caches.blocks(0) == 4
