"""The KV memory of a simulated engine: blocks in use, and a prefix cache in the other blocks."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

BlockKey = tuple[str, int]
"""Cache salt, and the hash of all tokens up to the end of the block."""


@dataclass(slots=True)
class Allocation:
    """The blocks of one sequence.

    Attributes:
        keys: of its leading blocks, which are complete and may be shared.
        private: number of further blocks, which only this sequence uses.
        reserved: number of blocks that it may still allocate.
    """

    keys: list[BlockKey] = field(default_factory=list)
    private: int = 0
    reserved: int = 0

    @property
    def blocks(self) -> int:
        return len(self.keys) + self.private


class KVCache:
    """Blocks with reference counts; unused blocks stay cached until they are evicted, least recently used first.

    Source: paged attention (Kwon et al., SOSP 2023) with hash-chained blocks as in vLLM. Unlike vLLM, it reserves all
    blocks that a sequence can ever need at its admission, so no sequence is preempted.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._users: dict[BlockKey, int] = {}
        self._idle: OrderedDict[BlockKey, None] = OrderedDict()
        self._private = 0
        self._reserved = 0

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1. Blocks that are only cached do not count."""
        return (len(self._users) + self._private) / self._blocks

    @property
    def idle(self) -> int:
        return len(self._idle)

    def cached_prefix(self, keys: Sequence[BlockKey]) -> int:
        for count, key in enumerate(keys):
            if key not in self._users and key not in self._idle:
                return count
        return len(keys)

    def admit(self, cached: Sequence[BlockKey], blocks: int) -> Allocation | None:
        """Admit a sequence that uses cached blocks and can ever need `blocks` in all; None if there is no room."""
        new = blocks - sum(key in self._users for key in cached)
        if len(self._users) + self._private + self._reserved + new > self._blocks:
            return None
        for key in cached:
            self._use(key)
        reserved = blocks - len(cached)
        self._reserved += reserved
        return Allocation(list(cached), reserved=reserved)

    def allocate(self, allocation: Allocation, blocks: int) -> None:
        allocation.reserved -= blocks
        allocation.private += blocks
        self._reserved -= blocks
        self._private += blocks
        self._evict()

    def share(self, allocation: Allocation, key: BlockKey) -> None:
        """Share the first private block, which is complete, with other sequences."""
        allocation.private -= 1
        allocation.keys.append(key)
        self._private -= 1
        self._use(key)

    def release(self, allocation: Allocation) -> None:
        self._private -= allocation.private
        self._reserved -= allocation.reserved
        # Last block first, so that it is evicted first: a block is useless without the blocks before it.
        for key in reversed(allocation.keys):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None

    def clear(self) -> bool:
        """Clear the cache; False if a block is in use."""
        if self._users or self._private:
            return False
        self._idle.clear()
        return True

    def _use(self, key: BlockKey) -> None:
        self._idle.pop(key, None)
        self._users[key] = self._users.get(key, 0) + 1

    def _evict(self) -> None:
        while len(self._users) + self._private + len(self._idle) > self._blocks:
            self._idle.popitem(last=False)
