"""Following a remote cache: the head asks on and takes each answer once, the server answers now and then."""

import random
from collections import deque
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.replicas.cache_publisher import Mirror
from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.replicas.control import cache_following
from vllm_omni_plugin.replicas.control.cache_following import CacheFollower, CacheFollowers, pack_keys, unpack_keys
from vllm_omni_plugin.replicas.control.lease_messages import (
    MAX_PART,
    CacheChanges,
    Follow,
    ToServer,
    decode_from_server,
    encode,
)
from vllm_omni_plugin.replicas.control.leases import Lease

LEASE = 5


def changes(part: int, *keys: int, restart: bool = False) -> CacheChanges:
    return CacheChanges(LEASE, part, pack_keys(keys), b"", restart, complete=True)


def test_the_second_answer_to_a_question_asked_twice_is_ignored() -> None:
    sent: list[ToServer] = []
    mirror = Mirror()
    follower = CacheFollower(LEASE, sent.append, mirror.take)
    follower.ask()
    assert sent == [Follow(LEASE, 0)] * 2
    for _ in range(2):
        follower.take(changes(1, 1, restart=True))
    assert mirror.restarts == 1
    assert sent[2:] == [Follow(LEASE, 1)]


def test_keys_that_are_cut_off_are_no_change(caplog: pytest.LogCaptureFixture) -> None:
    mirror = Mirror()
    follower = CacheFollower(LEASE, lambda _: None, mirror.take)
    follower.take(CacheChanges(LEASE, 1, b"1234567", b"", True, complete=True))
    assert mirror.restarts == 0
    assert "about cached blocks was dropped" in caplog.text


def test_a_message_with_more_keys_than_a_part_has_is_refused() -> None:
    with pytest.raises(WireError):
        decode_from_server(encode(changes(1, *range(MAX_PART + 1))))


class Server:
    """The followers of an engine, and heads between which and it messages wait until they are let through."""

    def __init__(self, heads: int) -> None:
        self.followers = CacheFollowers(lambda peer, message: self.down[int(peer)].append(message))
        self.leases = [Lease(number, slot=0, peer=b"%d" % number, head_id="", ends_at=0.0) for number in range(heads)]
        self.down: list[deque[Any]] = [deque() for _ in range(heads)]
        self.up: list[deque[Any]] = [deque() for _ in range(heads)]
        self.mirrors = [Mirror() for _ in range(heads)]
        self.heads: list[CacheFollower] = []

    def attach(self) -> None:
        """Let the heads follow."""
        for lease, up, mirror in zip(self.leases, self.up, self.mirrors, strict=True):
            self.heads.append(CacheFollower(lease.lease_id, up.append, mirror.take))

    def exchange(self, head: int, messages: int = 10**6) -> None:
        """Let at most so many messages of a head and answers to it through."""
        for _ in range(messages):
            if self.up[head]:
                self.followers.follow(self.leases[head], self.up[head].popleft().received)
            elif self.down[head]:
                self.heads[head].take(self.down[head].popleft())
            else:
                break


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are small, soon too many wait, and no answer waits for the one before."""
    monkeypatch.setattr(cache_following, "MAX_PART", 7)
    monkeypatch.setattr(cache_following, "_MOST_UNTOLD", 30)
    monkeypatch.setattr(CacheFollowers, "_answer_all", lambda self: [self._answer(r) for r in self._readers.values()])


@pytest.mark.usefixtures("small")
def test_nothing_is_said_before_the_first_report_but_that_nothing_is_cached_is() -> None:
    server = Server(1)
    server.attach()
    server.exchange(0)
    assert server.mirrors[0].restarts == 0
    server.followers.take(CacheChange(restart=True))
    server.exchange(0)
    assert (server.mirrors[0].restarts, server.mirrors[0].complete, server.mirrors[0].keys) == (1, True, set())


@pytest.mark.usefixtures("small")
def test_lost_reports_are_a_restart_that_is_not_complete() -> None:
    server = Server(1)
    (mirror,) = server.mirrors
    server.followers.take(CacheChange([1], restart=True))
    server.attach()
    server.exchange(0)
    server.followers.take(CacheChange(restart=True, complete=False))
    server.exchange(0)
    assert (mirror.keys, mirror.complete, mirror.restarts) == (set(), False, 2)
    server.followers.take(CacheChange(stored=[2], restart=True))
    server.exchange(0)
    assert (mirror.keys, mirror.complete, mirror.restarts) == ({2}, True, 3)


@pytest.mark.usefixtures("small")
def test_who_does_not_ask_for_long_is_told_what_there_is_instead_of_all_that_changed() -> None:
    server = Server(2)
    server.followers.take(CacheChange(restart=True))
    server.attach()
    for head in (0, 1):
        server.exchange(head)
    for key in range(5, 1005):
        server.followers.take(CacheChange(stored=[key]))
        server.followers.take(CacheChange(removed=[key - 5]))
        server.exchange(1)
    server.exchange(0)
    assert [mirror.keys for mirror in server.mirrors] == [{*range(1000, 1005)}] * 2
    assert [mirror.restarts for mirror in server.mirrors] == [2, 1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(10))
def test_heads_of_any_pace_agree_with_the_cache_though_messages_are_lost(seed: int) -> None:
    rng = random.Random(seed)
    server, truth = Server(5), set[int]()
    server.followers.take(CacheChange(restart=True))
    server.attach()
    for _ in range(400):
        stored = rng.sample(range(60), rng.randint(0, 8))
        removed = [key for key in rng.sample(range(60), rng.randint(0, 8)) if key not in stored]
        change = CacheChange(stored, removed, restart=rng.random() < 0.02)
        truth = (set() if change.restart else truth - set(removed)) | set(stored)
        server.followers.take(change)
        head = rng.randrange(5)
        if rng.random() < 0.2:
            rng.choice((server.up, server.down))[head].clear()
            server.heads[head].ask()
        server.exchange(head, rng.randint(1, 5))
    for head in range(5):
        server.heads[head].ask()
        server.exchange(head)
    assert [mirror.keys for mirror in server.mirrors] == [truth] * 5


async def test_what_changes_in_the_pause_after_an_answer_is_told_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_following, "_PAUSE_S", 0.0)
    sent: list[Any] = []
    followers = CacheFollowers(lambda peer, message: sent.append(message))
    lease = Lease(LEASE, slot=0, peer=b"head", head_id="head", ends_at=0.0)
    followers.follow(lease, 0)
    followers.take(CacheChange(restart=True))
    followers.follow(lease, 1)
    for key in (1, 2, 3):
        followers.take(CacheChange([key]))
    assert len(sent) == 1
    await eventually(lambda: len(sent) == 2)
    assert unpack_keys(sent[-1].stored) == (1, 2, 3)
