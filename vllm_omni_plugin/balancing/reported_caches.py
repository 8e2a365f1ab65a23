"""What the engines of a fleet say they have cached, and what stands in for it where they do not."""

from collections.abc import Sequence

from vllm_omni_plugin.balancing.approximate_cache import ApproximateCaches
from vllm_omni_plugin.balancing.cache_change import CacheChange
from vllm_omni_plugin.balancing.prefix_index import PrefixIndex

NO_EVENTS = "no-events"
"""The fallback where a replica never said what it has cached."""
STALE_EVENTS = "stale-events"
"""The fallback where some of what a replica said is lost."""


class ReportedCaches:
    """The prefix caches of all replicas; a slot stands for a replica, see `BlockHolders`.

    What an engine reports is exact but late: what is in flight to it counts as cached already. Where reports are
    missing or incomplete, what was sent to the replica counts, as an engine of its size would keep it.

    While reports are complete, that estimate is not read. For the day they are lost it is kept as cheaply as can be:
    nothing of it is done before a request is sent, and its blocks are in no index.
    """

    def __init__(self) -> None:
        self._known = PrefixIndex()
        # By slot, the known blocks that are in flight and not reported, and how many prompts have each.
        self._expected: dict[int, dict[int, int]] = {}
        self._estimated = ApproximateCaches()
        # By slot and by its keys' identity, what is in flight and not in the estimate, with the replica's capacity.
        self._unestimated: dict[int, dict[int, tuple[Sequence[int], int]]] = {}
        # Bit masks of slots.
        self._heard_of = 0
        self._complete = 0

    def levels(self, keys: Sequence[int], slots: int) -> list[tuple[int, int]]:
        """How many of the leading blocks of `keys` somebody has, and who; a slot may come twice.

        Args:
            keys: all blocks of a prompt from its beginning.
            slots: a mask of those that matter; others may be among the holders.
        """
        # A search suffices, since vLLM never evicts a block before those behind it.
        found = self._known.closed_levels(keys)
        if estimated := slots & ~self._complete:
            found += [(blocks, holders & estimated) for blocks, holders in self._estimated.levels(keys)]
        return found

    def shortcoming(self, slots: int) -> str:
        """What is missing to know the caches of a mask of slots: `NO_EVENTS`, `STALE_EVENTS` or ""."""
        if not slots & ~self._complete:
            return ""
        return NO_EVENTS if slots & ~self._heard_of else STALE_EVENTS

    def send(self, slot: int, keys: Sequence[int], capacity: int) -> None:
        """A prompt with these blocks goes to a replica with so many blocks of memory."""
        expected = self._expected.setdefault(slot, {})
        known = max((blocks for blocks, holders in self._known.closed_levels(keys) if holders >> slot & 1), default=0)
        if expected:
            for key in expected.keys() & keys[:known]:
                expected[key] += 1
        added = keys[known:]
        expected.update(dict.fromkeys(added, 1))
        self._known.store(slot, added)
        if self._complete >> slot & 1:
            self._unestimated.setdefault(slot, {})[id(keys)] = keys, capacity
        else:
            self._estimated.use(slot, keys, capacity)

    def end(self, slot: int, keys: Sequence[int]) -> None:
        """It is no longer in flight. `keys` is the very sequence that was sent."""
        if sent := self._unestimated.get(slot, {}).pop(id(keys), None):
            self._estimated.use(slot, *sent)
        expected = self._expected.get(slot)
        if not expected:
            return
        gone: list[int] = []
        for key in keys:
            prompts = expected.get(key, 0)
            if prompts > 1:
                expected[key] = prompts - 1
            elif prompts:
                del expected[key]
                gone.append(key)
        self._known.remove(slot, gone)

    def estimate(self, slot: int, keys: Sequence[int], capacity: int) -> None:
        """A replica must have these blocks, which nobody reports."""
        self._estimated.use(slot, keys, capacity)

    def change(self, slot: int, change: CacheChange) -> None:
        """An engine has reported."""
        bit = 1 << slot
        if change.restart and change.complete:
            self.empty(slot)
        elif change.restart:
            self._known.clear(slot)
            self._expected.pop(slot, None)
        self._known.remove(slot, change.removed)
        self._known.store(slot, change.stored)
        if expected := self._expected.get(slot):
            for key in (*change.removed, *change.stored):
                expected.pop(key, None)
        self._heard_of |= bit
        self._trust(slot, change.complete)

    def empty(self, slot: int) -> None:
        """Nothing is cached any more; its engine has yet to report that."""
        self._known.clear(slot)
        self._expected.pop(slot, None)
        self._unestimated.pop(slot, None)
        self._estimated.clear(slot)

    def clear(self, slot: int) -> None:
        """Nothing is cached or in flight, and nothing was ever reported. The slot may be given to another replica."""
        self.empty(slot)
        self._heard_of &= ~(1 << slot)
        self._trust(slot, False)

    def _trust(self, slot: int, complete: bool) -> None:
        """Read the estimate of a replica's cache from now on, or no longer."""
        if complete:
            self._complete |= 1 << slot
            self._estimated.hide(slot)
            return
        self._complete &= ~(1 << slot)
        for keys, capacity in self._unestimated.pop(slot, {}).values():
            self._estimated.use(slot, keys, capacity)
        self._estimated.show(slot)
