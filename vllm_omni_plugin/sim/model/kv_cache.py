"""The KV memory of a simulated engine: blocks in use, and a prefix cache in those that are not."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

BlockKey = tuple[str, int]
"""Cache salt, and the hash of all tokens up to and including the block's."""


@dataclass(slots=True)
class Allocation:
    """The blocks of one sequence.

    Attributes:
        keys: of its leading blocks, which are complete and may be shared.
        private: blocks behind these that only it uses.
        reserved: blocks it may still allocate.
    """

    keys: list[BlockKey] = field(default_factory=list)
    private: int = 0
    reserved: int = 0

    @property
    def blocks(self) -> int:
        """Blocks in use."""
        return len(self.keys) + self.private


class KVCache:
    """Blocks of KV memory with reference counts; those nobody uses stay cached, least recently used first to go.

    Source: paged attention (Kwon et al., SOSP 2023) with hash-chained blocks as in vLLM. Unlike there, a sequence is
    granted a reservation for all it can ever need when it is admitted, so none is ever preempted.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._users: dict[BlockKey, int] = {}
        self._idle: OrderedDict[BlockKey, None] = OrderedDict()
        self._private = 0
        self._reserved = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1. Cached blocks are not."""
        return (len(self._users) + self._private) / self._blocks

    @property
    def idle(self) -> int:
        """Blocks that are cached and not in use."""
        return len(self._idle)

    def cached_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of the leading blocks are there."""
        for count, key in enumerate(keys):
            if key not in self._users and key not in self._idle:
                return count
        return len(keys)

    def admit(self, cached: Sequence[BlockKey], blocks: int) -> Allocation | None:
        """Let a sequence in, or return None while there is no room for it.

        Args:
            cached: keys of leading blocks that are there, to use.
            blocks: all it can ever need, these included.
        """
        new = blocks - sum(key in self._users for key in cached)
        if len(self._users) + self._private + self._reserved + new > self._blocks:
            return None
        for key in cached:
            self._use(key)
        reserved = blocks - len(cached)
        self._reserved += reserved
        return Allocation(list(cached), reserved=reserved)

    def allocate(self, allocation: Allocation, blocks: int) -> None:
        """Let a sequence use `blocks` more of those it was reserved."""
        allocation.reserved -= blocks
        allocation.private += blocks
        self._reserved -= blocks
        self._private += blocks
        self._evict()

    def share(self, allocation: Allocation, key: BlockKey) -> None:
        """The first private block of a sequence is complete: from here on others may use it."""
        allocation.private -= 1
        allocation.keys.append(key)
        self._private -= 1
        self._use(key)

    def release(self, allocation: Allocation) -> None:
        """A sequence has ended."""
        self._private -= allocation.private
        self._reserved -= allocation.reserved
        # The last block first: a prefix is of no use without what comes before.
        for key in reversed(allocation.keys):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None

    def clear(self) -> bool:
        """Forget what is cached, unless something is in use; returns whether it did."""
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
