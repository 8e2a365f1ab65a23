"""A log of the changes of one engine's prefix cache. Readers read it in parts, from any position."""

from array import array
from collections.abc import Callable
from typing import NamedTuple

from vllm_omni_plugin.balancing import CacheChange

MAX_PART = 8192
"""Most changes in one part."""
_SHORTEST_COMPACTED = 65_536


class Cursor(NamedTuple):
    """Position of a reader: a log, which starts with all blocks cached at that time, and how many changes were read."""

    epoch: int
    position: int


BEGINNING = Cursor(0, 0)


class CacheLog:
    """Starts a new log when the cache is cleared, when reports are lost, and to compact a long log.

    A reader of an older log gets the current log from the beginning, as a restart. A reader that had read all of a log
    before it was compacted continues without a restart. `on_change` is called after every change.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._complete = False
        self._cached: set[int] = set()
        self._epoch = 0
        self._keys = array("Q")
        self._is_stored = bytearray()
        self._compacted: tuple[Cursor, Cursor] | None = None

    def append(self, change: CacheChange) -> None:
        if change.restart:
            self._begin(set())
        elif len(self._keys) > 4 * len(self._cached) + _SHORTEST_COMPACTED:
            end = self._end
            self._begin(self._cached)
            self._compacted = end, self._end
        self._complete = change.complete
        for key in change.removed:
            if key in self._cached:
                self._cached.remove(key)
                self._log(key, 0)
        for key in change.stored:
            if key not in self._cached:
                self._cached.add(key)
                self._log(key, 1)
        self.on_change()

    def since(self, cursor: Cursor) -> tuple[Cursor, CacheChange] | None:
        """The next cursor and up to `MAX_PART` changes after `cursor`; None if there are none."""
        if self._compacted is not None and cursor == self._compacted[0]:
            cursor = self._compacted[1]
        restart = cursor.epoch != self._epoch or not 0 <= cursor.position <= len(self._keys)
        begin = 0 if restart else cursor.position
        end = min(begin + MAX_PART, len(self._keys))
        if begin == end and not restart:
            return None
        last = dict(zip(self._keys[begin:end], self._is_stored[begin:end], strict=True))
        stored = tuple(key for key, is_stored in last.items() if is_stored)
        removed = tuple(key for key, is_stored in last.items() if not is_stored)
        return Cursor(self._epoch, end), CacheChange(stored, removed, restart, self._complete)

    @property
    def _end(self) -> Cursor:
        return Cursor(self._epoch, len(self._keys))

    def _begin(self, cached: set[int]) -> None:
        self._epoch += 1
        self._cached = cached
        self._keys = array("Q", cached)
        self._is_stored = bytearray(b"\1") * len(cached)
        self._compacted = None

    def _log(self, key: int, is_stored: int) -> None:
        self._keys.append(key)
        self._is_stored.append(is_stored)
