"""Whoever reads the log of a cache, in parts and from anywhere, ends up with what is cached."""

import random

import pytest

from tests.replicas.cache_publisher import Mirror
from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.replicas.kv_events import cache_log
from vllm_omni_plugin.replicas.kv_events.cache_log import BEGINNING, CacheLog, Cursor


class Reader(Mirror):
    def __init__(self) -> None:
        super().__init__()
        self.cursor = BEGINNING
        self.parts = 0

    def read(self, log: CacheLog, parts: int = 10**6) -> "Reader":
        """Read at most `parts` parts."""
        for _ in range(parts):
            part = log.since(self.cursor)
            if part is None:
                break
            self.cursor, change = part
            self.parts += 1
            self.apply(change)
        return self


def begun(*keys: int) -> CacheLog:
    log = CacheLog()
    log.append(CacheChange(keys, restart=True))
    return log


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_log, "MAX_PART", 7)
    monkeypatch.setattr(cache_log, "_SHORTEST_COMPACTED", 30)


def test_an_empty_cache_is_reported_but_no_report_is_not() -> None:
    assert CacheLog().since(BEGINNING) is None
    reader = Reader().read(begun())
    assert (reader.restarts, reader.complete, reader.keys) == (1, True, set())


def test_a_reader_gets_all_blocks_and_then_the_changes() -> None:
    log = begun(1, 2)
    reader = Reader().read(log)
    assert reader.keys == {1, 2}
    log.append(CacheChange(stored=[3, 2], removed=[1, 9]))
    assert reader.read(log).keys == {2, 3}
    assert (reader.restarts, reader.parts) == (1, 2)
    log.append(CacheChange(stored=[3], removed=[1]))
    assert log.since(reader.cursor) is None


def test_lost_reports_are_an_incomplete_restart() -> None:
    log = begun(1)
    reader = Reader().read(log)
    log.append(CacheChange(restart=True, complete=False))
    reader.read(log)
    assert (reader.keys, reader.complete, reader.restarts) == (set(), False, 2)
    log.append(CacheChange(stored=[2], restart=True))
    reader.read(log)
    assert (reader.keys, reader.complete, reader.restarts) == ({2}, True, 3)


@pytest.mark.parametrize("cursor", [Cursor(7, 10**6), Cursor(1, 2), Cursor(1, -1)], ids=["later", "ahead", "none"])
def test_an_unknown_cursor_restarts(cursor: Cursor) -> None:
    part = begun(1).since(cursor)
    assert part is not None
    assert part[1] == CacheChange((1,), (), restart=True)


@pytest.mark.usefixtures("small")
def test_a_log_is_compacted_and_only_slow_readers_restart() -> None:
    log = begun()
    slow, quick = Reader().read(log), Reader().read(log)
    for key in range(1000):
        log.append(CacheChange(stored=[key]))
        log.append(CacheChange(removed=[key - 5]))
        quick.read(log)
    assert slow.read(log).keys == quick.keys == set(range(995, 1000))
    assert (slow.restarts, quick.restarts) == (2, 1)
    assert slow.parts < 15


def test_on_change_is_called_when_the_change_can_be_read() -> None:
    log = CacheLog()
    seen: list[set[int]] = []
    log.on_change = lambda: seen.append(Reader().read(log).keys)
    log.append(CacheChange([1], restart=True))
    log.append(CacheChange(removed=[1]))
    assert seen == [{1}, set()]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(10))
def test_fast_and_slow_readers_agree_with_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    log, truth = begun(), set[int]()
    readers = [Reader() for _ in range(5)]
    for _ in range(400):
        stored = rng.sample(range(60), rng.randint(0, 8))
        removed = [key for key in rng.sample(range(60), rng.randint(0, 8)) if key not in stored]
        change = CacheChange(stored, removed, restart=rng.random() < 0.02)
        truth = (set() if change.restart else truth - set(removed)) | set(stored)
        log.append(change)
        readers[rng.randrange(5)].read(log, parts=rng.randint(1, 5))
    assert [reader.read(log).keys for reader in readers] == [truth] * 5
