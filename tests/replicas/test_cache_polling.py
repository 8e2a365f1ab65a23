"""Following a remote cache: the head asks on and takes each answer once, the server answers now and then."""

from typing import Any

import pytest

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
from vllm_omni_plugin.replicas.kv_events.cache_log import BEGINNING, MAX_PART, CacheLog, Cursor

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
