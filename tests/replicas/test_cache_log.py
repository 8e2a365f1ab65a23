"""Whoever reads the log of a cache, in parts and from anywhere, ends up with what is cached."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.fakes.conditions import eventually
from tests.replicas.cache_publisher import Mirror
from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.replicas.control import cache_polling
from vllm_omni_plugin.replicas.control.cache_polling import CachePollClient, CachePollServer, pack_keys, unpack_keys
from vllm_omni_plugin.replicas.control.lease_messages import (
    CacheChanges,
    PollCache,
    ToServer,
    decode_from_server,
    encode,
)
from vllm_omni_plugin.replicas.control.leases import Lease
from vllm_omni_plugin.replicas.kv_events import cache_log
from vllm_omni_plugin.replicas.kv_events.cache_log import BEGINNING, MAX_PART, CacheLog, Cursor


class Reader(Mirror):
    def __init__(self) -> None:
        super().__init__()
        self.cursor = BEGINNING

    def read(self, log: CacheLog, parts: int = 10**6) -> int:
        """Read at most `parts` parts; returns how many there were."""
        for number in range(parts):
            part = log.since(self.cursor)
            if part is None:
                return number
            self.cursor, change = part
            assert len(change.stored) + len(change.removed) <= cache_log.MAX_PART
            self.apply(change)
        return parts


blocks = st.sets(st.integers(0, 60), max_size=8)


class Histories(RuleBasedStateMachine):
    """An engine reports changes of its cache, and readers of any speed read a log with short parts."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [patch.object(cache_log, "MAX_PART", 7), patch.object(cache_log, "_SHORTEST_COMPACTED", 30)]
        for each in self.patches:
            each.start()
        self.log = CacheLog()
        assert self.log.since(BEGINNING) is None
        self.truth, self.complete, self.restarts = set[int](), True, 0
        self.readers = [Reader() for _ in range(3)]
        self.quick = Reader()
        self.append(set(), set(), True, True)

    @rule(stored=blocks, removed=blocks, restart=st.booleans(), complete=st.booleans())
    def append(self, stored: set[int], removed: set[int], restart: bool, complete: bool) -> None:
        # A change after which reports are missing is a restart, and so is the next one.
        restart = restart or not complete or not self.complete
        removed -= stored
        self.truth = (set() if restart else self.truth - removed) | stored
        self.complete, self.restarts = complete, self.restarts + restart
        self.log.append(CacheChange(tuple(stored), tuple(removed), restart, complete))
        self.quick.read(self.log)
        assert self.log.since(self.quick.cursor) is None

    @rule(rounds=st.integers(1, 40))
    def churn(self, rounds: int) -> None:
        for number in range(rounds):
            self.append({number % 50}, {(number + 45) % 50}, False, True)

    @rule(number=st.integers(0, 2), parts=st.integers(1, 5))
    def read(self, number: int, parts: int) -> None:
        self.readers[number].read(self.log, parts)

    @rule(number=st.integers(0, 2), epoch=st.integers(0, 3), position=st.integers(-1, 100))
    def jump(self, number: int, epoch: int, position: int) -> None:
        """A reader of another log, which knows nothing of this one."""
        self.readers[number] = Reader()
        self.readers[number].cursor = Cursor(epoch + 10**6, position)

    def teardown(self) -> None:
        for reader in (*self.readers, self.quick):
            # A log is compacted, so even a reader from the beginning does not read all that ever happened.
            assert reader.read(self.log) < 60
            assert (reader.keys, reader.complete) == (self.truth, self.complete)
        assert self.quick.restarts == self.restarts
        for each in self.patches:
            each.stop()


TestHistories = Histories.TestCase


def test_a_position_that_the_log_does_not_have_restarts() -> None:
    log = CacheLog()
    log.append(CacheChange((1,), restart=True))
    for cursor in (Cursor(7, 10**6), Cursor(1, 2), Cursor(1, -1)):
        part = log.since(cursor)
        assert part is not None
        assert part[1] == CacheChange((1,), (), restart=True)


def test_on_change_is_called_when_the_change_can_be_read() -> None:
    log, reader = CacheLog(), Reader()
    seen: list[set[int]] = []

    def read() -> None:
        reader.read(log)
        seen.append(set(reader.keys))

    log.on_change = read
    log.append(CacheChange([1], restart=True))
    log.append(CacheChange(removed=[1]))
    assert seen == [{1}, set()]


LEASE = 5


def changes(since: Cursor, cursor: Cursor, *keys: int, restart: bool = False) -> CacheChanges:
    return CacheChanges(LEASE, since, cursor, pack_keys(keys), b"", restart, complete=True)


def test_a_second_answer_to_the_same_poll_is_ignored() -> None:
    sent: list[ToServer] = []
    mirror = Mirror()
    follower = CachePollClient(LEASE, sent.append, mirror.apply)
    follower.poll()
    assert sent == [PollCache(LEASE, BEGINNING)] * 2
    answer = changes(BEGINNING, Cursor(3, 3), 1, restart=True)
    follower.handle(answer)
    follower.handle(answer)
    assert mirror.restarts == 1
    assert sent[2:] == [PollCache(LEASE, Cursor(3, 3))]


def test_a_message_with_incomplete_keys_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    mirror = Mirror()
    follower = CachePollClient(LEASE, lambda _: None, mirror.apply)
    follower.handle(CacheChanges(LEASE, BEGINNING, Cursor(3, 3), b"1234567", b"", True, complete=True))
    assert mirror.restarts == 0
    assert "about cached blocks was dropped" in caplog.text


def test_a_message_with_too_many_keys_is_refused() -> None:
    with pytest.raises(WireError):
        decode_from_server(encode(changes(BEGINNING, Cursor(1, 1), *range(MAX_PART + 1))))


async def test_changes_in_the_pause_after_an_answer_are_sent_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_polling, "PAUSE_S", 0.0)
    sent: list[Any] = []
    followers, log = CachePollServer(lambda peer, message: sent.append(message)), CacheLog()
    lease = Lease(LEASE, slot=0, peer=b"head", head_id="head", ends_at=0.0)
    followers.set_log(log)
    followers.poll(lease, BEGINNING)
    log.append(CacheChange(restart=True))
    followers.poll(lease, sent[-1].cursor)
    for key in (1, 2, 3):
        log.append(CacheChange([key]))
    assert len(sent) == 1
    await eventually(lambda: len(sent) == 2)
    assert unpack_keys(sent[-1].stored) == (1, 2, 3)
