"""Whoever reads the journal of a cache, in parts and from anywhere, ends up with what is cached."""

import random
from collections.abc import Iterable

import pytest

from vllm_omni_plugin.balancing.base import CacheChange
from vllm_omni_plugin.replicas import cache_journal
from vllm_omni_plugin.replicas.cache_journal import BEGINNING, CacheJournal, Cursor


class Reader:
    """Applies what it reads, as a policy does."""

    def __init__(self) -> None:
        self.cursor = BEGINNING
        self.keys: set[int] = set()
        self.complete = False
        self.restarts = 0
        self.parts = 0

    def read(self, journal: CacheJournal, limit: int = 1000, parts: int = 10**6) -> "Reader":
        """Take in what is new, up to so many parts."""
        for _ in range(parts):
            part = journal.since(self.cursor, limit)
            if part is None:
                break
            self.cursor, change = part
            self.parts += 1
            if change.restart:
                self.restarts += 1
                self.keys.clear()
            self.keys.difference_update(change.removed)
            self.keys.update(change.stored)
            self.complete = change.complete
        return self


def begun(*keys: int) -> CacheJournal:
    """A journal of an engine that has these blocks cached."""
    journal = CacheJournal()
    journal.append(CacheChange(keys, restart=True))
    return journal


def test_nothing_is_said_before_the_first_report() -> None:
    assert CacheJournal().since(BEGINNING) is None


def test_an_empty_cache_is_something_to_say() -> None:
    reader = Reader().read(begun())
    assert (reader.restarts, reader.complete, reader.keys) == (1, True, set())


def test_a_reader_gets_all_and_then_what_changes() -> None:
    journal = begun(1, 2)
    reader = Reader().read(journal)
    assert reader.keys == {1, 2}
    journal.append(CacheChange(stored=[3], removed=[1]))
    assert reader.read(journal).keys == {2, 3}
    assert reader.restarts == 1
    assert journal.since(reader.cursor) is None


def test_what_is_stored_again_or_removed_without_being_there_is_no_news() -> None:
    journal = begun(1)
    reader = Reader().read(journal)
    journal.append(CacheChange(stored=[1], removed=[9]))
    assert journal.since(reader.cursor) is None


def test_only_the_last_part_is_complete() -> None:
    journal = begun(*range(25))
    reader = Reader().read(journal, limit=10, parts=2)
    assert not reader.complete
    assert reader.read(journal, limit=10).complete
    assert (reader.parts, reader.keys, reader.restarts) == (3, set(range(25)), 1)


def test_what_changes_between_two_parts_is_not_missed() -> None:
    journal = begun(*range(20))
    reader = Reader().read(journal, limit=10, parts=1)
    journal.append(CacheChange(stored=[100], removed=[0, 15]))
    assert reader.read(journal, limit=10).keys == {*range(1, 15), *range(16, 20), 100}


def test_lost_reports_are_a_restart_that_is_not_complete() -> None:
    journal = begun(1)
    reader = Reader().read(journal)
    journal.append(CacheChange(stored=[2], restart=True, complete=False))
    reader.read(journal)
    assert (reader.keys, reader.complete, reader.restarts) == ({2}, False, 2)
    journal.append(CacheChange(complete=True))
    assert reader.read(journal).complete
    assert reader.restarts == 2


@pytest.mark.parametrize("cursor", [Cursor(7, 10**6), Cursor(10**6, 0), Cursor(-1, -1)], ids=["ahead", "later", "none"])
def test_a_cursor_that_is_none_of_ours_begins_anew(cursor: Cursor) -> None:
    part = begun(1).since(cursor)
    assert part is not None
    assert part.change == CacheChange((1,), (), restart=True)


def test_a_cursor_from_before_forgotten_removals_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_journal, "_REMEMBERED_REMOVALS", 10)
    journal = begun(*range(30))
    slow, quick = Reader().read(journal), Reader().read(journal)
    for key in range(20):
        journal.append(CacheChange(removed=[key]))
        quick.read(journal)
    assert slow.read(journal).keys == quick.keys == set(range(20, 30))
    assert (slow.restarts, quick.restarts) == (2, 1)


def test_the_log_is_bounded_by_what_is_cached_and_not_by_what_happened() -> None:
    journal = begun()
    for key in range(200_000):
        journal.append(CacheChange(stored=[key % 100]))
        journal.append(CacheChange(removed=[key % 100]))
    reader = Reader().read(journal, limit=1000)
    assert reader.parts < 10
    assert reader.keys == set()


def test_a_change_is_announced_when_it_can_be_read() -> None:
    journal = CacheJournal()
    seen: list[set[int]] = []
    journal.on_change = lambda: seen.append(Reader().read(journal).keys)
    journal.append(CacheChange([1], restart=True))
    journal.append(CacheChange(removed=[1]))
    assert seen == [{1}, set()]


@pytest.mark.parametrize("seed", range(10))
def test_readers_of_any_pace_agree_with_the_cache(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_journal, "_REMEMBERED_REMOVALS", 20)
    monkeypatch.setattr(cache_journal, "_COMPACTED_FROM", 30)
    rng = random.Random(seed)
    journal, truth = begun(), set[int]()
    readers = [Reader() for _ in range(5)]
    for _ in range(400):
        change = _random_change(rng)
        if change.restart:
            truth.clear()
        truth = (truth - set(change.removed)) | set(change.stored)
        journal.append(change)
        readers[rng.randrange(5)].read(journal, limit=rng.randint(1, 9), parts=rng.randint(1, 5))
    assert [reader.read(journal, limit=7).keys for reader in readers] == [truth] * 5


def _random_change(rng: random.Random) -> CacheChange:
    def some() -> Iterable[int]:
        return rng.sample(range(60), rng.randint(0, 8))

    stored = list(some())
    return CacheChange(stored, [key for key in some() if key not in stored], restart=rng.random() < 0.02)
