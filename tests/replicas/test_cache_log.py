"""Blocks as engines name them become the keys of policies; who reads the log of a cache knows what is cached."""

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.fakes.conditions import eventually
from tests.replicas.cache_publisher import Mirror
from vllm_omni_plugin.balancing import CacheChange, Prompt
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
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
from vllm_omni_plugin.replicas.kv_events.cached_blocks import CachedBlocks
from vllm_omni_plugin.replicas.kv_events.engine_events import BlockRemoved, BlockStored, decode_events


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


SIZE = 4
TOKENS = list(range(100, 112))
# One token more than the blocks hold: the last token of a prompt is never looked up.
KEYS = tuple(prompt_keys(Prompt([*TOKENS, 0]), SIZE))


def stored(*hashes: int, parent: int | None = None, first: int = 0, **other: object) -> BlockStored:
    """The event of blocks of `TOKENS` from index `first` on, with these hashes."""
    tokens = TOKENS[first * SIZE : (first + len(hashes)) * SIZE]
    return msgspec.convert(
        {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": SIZE,
            **other,
        },
        BlockStored,
    )


def removed(*hashes: int, **other: object) -> BlockRemoved:
    return msgspec.convert({"type": "BlockRemoved", "block_hashes": hashes, **other}, BlockRemoved)


def as_sent(event: BlockStored | BlockRemoved) -> dict[str, Any]:
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}


def test_blocks_stored_at_once_or_one_after_another_have_the_keys_of_their_prompt() -> None:
    assert CachedBlocks().apply([stored(1, 2, 3)]).stored == KEYS
    names = CachedBlocks()
    assert names.apply([stored(1)]).stored == KEYS[:1]
    assert names.apply([stored(2, 3, parent=1, first=1)]).stored == KEYS[1:]


def test_a_block_with_several_hashes_is_reusable_until_the_last_hash_is_removed() -> None:
    names = CachedBlocks()
    names.apply([stored(1, lookahead_token_ids=[[7]]), stored(2, lookahead_token_ids=[[8]])])
    assert names.apply([removed(1)]) == CacheChange()
    assert names.apply([stored(1, lookahead_token_ids=[[7]]), removed(2)]).removed == ()
    assert names.apply([removed(1)]).removed == KEYS[:1]


def test_a_block_is_reusable_until_its_last_copy_is_removed() -> None:
    names = CachedBlocks()
    names.apply([stored(1, 2)])
    names.apply([stored(1, 2), stored(1)])
    assert names.copies == 5
    assert names.apply([removed(1, 2)]) == CacheChange()
    assert names.apply([removed(1, 2)]).removed == KEYS[1:2]
    assert names.apply([removed(1)]).removed == KEYS[:1]
    assert names.copies == 0


def test_the_last_event_of_a_block_in_a_batch_counts() -> None:
    names = CachedBlocks()
    assert names.apply([stored(1), removed(1), stored(1)]) == CacheChange(stored=KEYS[:1])
    assert names.apply([removed(1), stored(1), removed(1)]) == CacheChange(removed=KEYS[:1])


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(7, parent=6, first=1), id="its chain began before we listened"),
        pytest.param(stored(7, medium="CPU"), id="in other memory"),
        pytest.param(stored(7, group_idx=1), id="of another group"),
        pytest.param(stored(7, kv_cache_spec_kind="sliding_window"), id="of a sliding window"),
        pytest.param(stored(7, extra_keys=[[b"digest"]]), id="of embeddings"),
        pytest.param(stored(7, extra_keys=[None, None]), id="more extra keys than blocks"),
        pytest.param(msgspec.structs.replace(stored(7), token_ids=TOKENS), id="more tokens than blocks"),
        pytest.param(removed(7), id="removed and never seen"),
    ],
)
def test_events_of_unusable_blocks_are_ignored(event: BlockStored | BlockRemoved) -> None:
    names = CachedBlocks()
    assert names.apply([event]) == CacheChange()
    assert names.copies == 0


def test_a_removal_from_other_memory_is_ignored() -> None:
    names = CachedBlocks()
    names.apply([stored(1)])
    assert names.apply([removed(1, medium="CPU"), removed(1, group_idx=1)]) == CacheChange()


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(msgspec.msgpack.encode([1.0]), id="no events"),
        pytest.param(msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": 1}]]), id="wrong type"),
        pytest.param(msgspec.msgpack.encode([1.0, [{"block_hashes": [1]}]]), id="no kind"),
        pytest.param(msgspec.msgpack.encode([1.0, [7]]), id="no event"),
    ],
)
def test_a_malformed_batch_is_refused(batch: bytes) -> None:
    with pytest.raises(WireError, match="batch of cache events"):
        decode_events(batch)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param({"type": "Nonsense"}, "Nonsense: Invalid value", id="unknown kind"),
        pytest.param(
            as_sent(stored(9)) | {"token_ids": [-1]}, "BlockStored: Expected `int` >= 0", id="token below zero"
        ),
        pytest.param(as_sent(stored(9)) | {"block_hashes": "h"}, "BlockStored: Expected `array`", id="wrong type"),
    ],
)
def test_an_invalid_event_is_skipped_and_the_others_of_its_batch_are_used(event: dict[str, Any], reason: str) -> None:
    skipped: list[str] = []
    batch = [as_sent(stored(1)), event, as_sent(stored(2, parent=1, first=1)), as_sent(removed(1))]
    events = decode_events(msgspec.msgpack.encode([1.0, batch]), skipped.append)
    assert CachedBlocks().apply(events) == CacheChange(stored=KEYS[1:2], removed=KEYS[:1])
    assert len(skipped) == 1
    assert skipped[0].startswith(reason)
