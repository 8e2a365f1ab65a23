"""KV memory: no block is lost or reserved twice, and the least recently used block is evicted first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_omni_plugin.sim.model.kv_cache import Allocation, BlockKey, KVCache

BLOCKS = 8


def key(number: int) -> BlockKey:
    return ("", number)


def hold(cache: KVCache, *numbers: int) -> Allocation:
    """Admit a sequence that computes these blocks."""
    allocation = cache.admit((), len(numbers))
    assert allocation is not None
    cache.allocate(allocation, len(numbers))
    for number in numbers:
        cache.share(allocation, key(number))
    return allocation


def test_the_least_recently_used_block_is_evicted_first_and_the_end_of_a_prompt_before_its_start() -> None:
    cache = KVCache(BLOCKS)
    cache.release(hold(cache, 1, 2, 3))
    cache.release(hold(cache, 4, 5, 6))
    hold(cache, 7, 8, 9)
    assert [cache.cached_prefix([key(number)]) for number in range(1, 7)] == [1, 1, 0, 1, 1, 1]


class Histories(RuleBasedStateMachine):
    """Any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(BLOCKS)
        self.admitted: list[tuple[Allocation, int]] = []

    @rule(stem=st.integers(0, 2), blocks=st.integers(1, 5))
    def admit(self, stem: int, blocks: int) -> None:
        keys = [key(stem * 10 + position) for position in range(blocks - 1)]
        cached = keys[: self.cache.cached_prefix(keys)]
        allocation = self.cache.admit(cached, blocks)
        if allocation is not None:
            self.admitted.append((allocation, stem))

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        allocation, stem = data.draw(st.sampled_from(self.admitted))
        if allocation.reserved:
            self.cache.allocate(allocation, 1)
            self.cache.share(allocation, key(stem * 10 + len(allocation.keys)))

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.admitted) - 1))
        self.cache.release(self.admitted.pop(index)[0])

    @invariant()
    def usage_is_that_of_the_allocations(self) -> None:
        shared = {shared for allocation, _ in self.admitted for shared in allocation.keys}
        private = sum(allocation.private for allocation, _ in self.admitted)
        assert self.cache.usage == (len(shared) + private) / BLOCKS
        assert len(shared) + private + self.cache.idle <= BLOCKS

    @invariant()
    def reservations_can_be_met(self) -> None:
        shared = {shared for allocation, _ in self.admitted for shared in allocation.keys}
        reservations = sum(allocation.reserved + allocation.private for allocation, _ in self.admitted)
        assert len(shared) + reservations <= BLOCKS


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30)
