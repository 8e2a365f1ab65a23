"""What one engine has cached, kept such that anybody can catch up with it from any point, in parts."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_omni_plugin.balancing.base import CacheChange

MAX_PART = 8192
"""Changes in one part."""
_REMEMBERED_REMOVALS = 65_536
_COMPACTED_FROM = 4096


class Cursor(NamedTuple):
    """How far a reader has come; `BEGINNING` for one that knows nothing.

    Attributes:
        began: the journal's version when this reader began to read all of it.
        position: the version of the last change that it has read.
    """

    began: int
    position: int


BEGINNING = Cursor(0, 0)


class Part(NamedTuple):
    """What comes after a cursor, and the cursor after that."""

    cursor: Cursor
    change: CacheChange


class CacheJournal:
    """A log of changes in which only the last one of each block is kept: never much longer than what is cached.

    Every change has a version. A removal is forgotten when many others came after it; a reader that was not past it by
    then cannot know of it and begins anew.

    Attributes:
        on_change: called after every change.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._version = 0
        self._complete = False
        # A reader of less than this has missed something.
        self._floor = 0
        # The version of a block's last change, in the order of versions.
        self._live: dict[int, int] = {}
        self._removed: dict[int, int] = {}
        self._keys = array("Q")
        self._versions = array("Q")

    def append(self, change: CacheChange) -> None:
        """Take in what changed."""
        if change.restart:
            self._restart()
        for key in change.removed:
            if self._live.pop(key, None) is not None:
                self._log(self._removed, key)
        for key in change.stored:
            if key not in self._live:
                self._removed.pop(key, None)
                self._log(self._live, key)
        if change.complete is not self._complete:
            self._complete = change.complete
            self._version += 1
        self._forget_removals()
        if len(self._keys) > 2 * (len(self._live) + len(self._removed)) + _COMPACTED_FROM:
            self._compact()
        self.on_change()

    def since(self, cursor: Cursor, limit: int = MAX_PART) -> Part | None:
        """What a reader does not know yet, at most `limit` changes of it, or None if it knows everything.

        The change says that it is complete only in the last part.
        """
        restart = not self._floor <= max(cursor) <= self._version
        if not restart and cursor.position == self._version:
            return None
        began, position = (self._version, 0) if restart else cursor
        start = bisect_right(self._versions, position)
        end = min(start + limit, len(self._keys))
        stored, removed = self._changes(range(start, end))
        is_last = end == len(self._keys)
        position = self._version if is_last else self._versions[end - 1]
        return Part(Cursor(began, position), CacheChange(stored, removed, restart, self._complete and is_last))

    def _changes(self, entries: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stored: list[int] = []
        removed: list[int] = []
        for entry in entries:
            key, version = self._keys[entry], self._versions[entry]
            if self._live.get(key) == version:
                stored.append(key)
            elif self._removed.get(key) == version:
                removed.append(key)
        return tuple(stored), tuple(removed)

    def _log(self, versions: dict[int, int], key: int) -> None:
        self._version += 1
        versions[key] = self._version
        self._keys.append(key)
        self._versions.append(self._version)

    def _restart(self) -> None:
        self._version += 1
        self._floor = self._version
        self._live.clear()
        self._removed.clear()
        del self._keys[:], self._versions[:]

    def _forget_removals(self) -> None:
        while len(self._removed) > _REMEMBERED_REMOVALS:
            self._floor = self._removed.pop(next(iter(self._removed)))

    def _compact(self) -> None:
        entries = zip(self._keys, self._versions, strict=True)
        last = [(key, version) for key, version in entries if version in (self._live.get(key), self._removed.get(key))]
        self._keys = array("Q", [key for key, _ in last])
        self._versions = array("Q", [version for _, version in last])
