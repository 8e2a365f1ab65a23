"""KV memory: nothing is lost, nothing is promised twice, the least recently used goes first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_omni_plugin.sim.model.kv_cache import BlockKey, Holding, KVCache

BLOCKS = 8


def key(number: int) -> BlockKey:
    return ("", number)


def hold(cache: KVCache, *numbers: int) -> Holding:
    """Let a sequence in that makes these blocks."""
    holding = cache.admit((), len(numbers))
    assert holding is not None
    cache.allocate(holding, len(numbers))
    for number in numbers:
        cache.share(holding, key(number))
    return holding


def test_the_least_recently_used_goes_first_and_of_one_prompt_its_end() -> None:
    cache = KVCache(BLOCKS)
    cache.release(hold(cache, 1, 2, 3))
    cache.release(hold(cache, 4, 5, 6))
    hold(cache, 7, 8, 9)
    assert [cache.cached_prefix([key(number)]) for number in range(1, 7)] == [1, 1, 0, 1, 1, 1]


class Histories(RuleBasedStateMachine):
    """Any order of calls that the model may make."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(BLOCKS)
        self.holdings: list[tuple[Holding, int]] = []

    @rule(stem=st.integers(0, 2), blocks=st.integers(1, 5))
    def admit(self, stem: int, blocks: int) -> None:
        keys = [key(stem * 10 + position) for position in range(blocks - 1)]
        cached = keys[: self.cache.cached_prefix(keys)]
        holding = self.cache.admit(cached, blocks)
        if holding is not None:
            self.holdings.append((holding, stem))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holding, stem = data.draw(st.sampled_from(self.holdings))
        if holding.promised:
            self.cache.allocate(holding, 1)
            self.cache.share(holding, key(stem * 10 + len(holding.keys)))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        self.cache.release(self.holdings.pop(index)[0])

    @invariant()
    def usage_is_that_of_the_holdings(self) -> None:
        shared = {shared for holding, _ in self.holdings for shared in holding.keys}
        private = sum(holding.private for holding, _ in self.holdings)
        assert self.cache.usage == (len(shared) + private) / BLOCKS
        assert len(shared) + private + self.cache.idle <= BLOCKS

    @invariant()
    def promises_can_be_kept(self) -> None:
        shared = {shared for holding, _ in self.holdings for shared in holding.keys}
        open_promises = sum(holding.promised + holding.private for holding, _ in self.holdings)
        assert len(shared) + open_promises <= BLOCKS


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30)
