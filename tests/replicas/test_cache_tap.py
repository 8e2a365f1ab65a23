"""The tap knows what an engine has cached, through everything that can go wrong between them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.fakes.conditions import eventually
from tests.replicas.cache_publisher import BLOCK_SIZE, CLEARED, FakePublisher, Mirror, removed, stored
from vllm_omni_plugin.balancing.block_keys import prompt_keys
from vllm_omni_plugin.balancing.prompt import Prompt
from vllm_omni_plugin.replicas.cache_source import find_cache_source
from vllm_omni_plugin.replicas.cache_tap import CacheTap, open_cache_tap

TOKENS = list(range(12))
KEYS = prompt_keys(Prompt([*TOKENS, 0]), BLOCK_SIZE)
FIRST, SECOND, THIRD = (TOKENS[start : start + BLOCK_SIZE] for start in range(0, 12, BLOCK_SIZE))


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[FakePublisher]:
    publisher = FakePublisher(tmp_path)
    yield publisher
    publisher.close()


Tap = Callable[..., Awaitable[Mirror]]


@pytest.fixture
async def tap(publisher: FakePublisher) -> AsyncIterator[Tap]:
    """Follow the publisher's engine; returns once what is published is heard."""
    taps: list[CacheTap] = []

    async def follow(blocks: int = 1000, *, can_ask: bool = True, check_interval: float = 10.0) -> Mirror:
        mirror = Mirror()
        other = {} if can_ask else {"replay_endpoint": None}
        source = find_cache_source(publisher.ready_response(blocks, **other))
        taps.append(CacheTap(source, mirror.take, "replica 3", check_interval))
        await eventually(lambda: publisher.is_subscribed, "a subscription")
        if can_ask and publisher.answers:
            await eventually(lambda: mirror.restarts == 1, "the first answer")
        return mirror

    yield follow
    for each in taps:
        each.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_engine_that_has_not_said_anything_is_known_to_have_nothing(tap: Tap) -> None:
    mirror = await tap()
    assert (mirror.keys, mirror.complete) == (set(), True)


async def test_what_was_published_before_we_listened_is_known(publisher: FakePublisher, tap: Tap) -> None:
    publisher.publish(stored(TOKENS, 1, 2, 3))
    publisher.publish(removed(3))
    mirror = await tap()
    assert (mirror.keys, mirror.complete, mirror.restarts) == (set(KEYS[:2]), True, 1)


async def test_blocks_come_and_go(publisher: FakePublisher, tap: Tap) -> None:
    mirror = await tap()
    publisher.publish(stored(FIRST, 1))
    publisher.publish(stored(SECOND + THIRD, 2, 3, parent=1))
    await eventually(lambda: mirror.keys == set(KEYS))
    publisher.publish(removed(3))
    await eventually(lambda: mirror.keys == set(KEYS[:2]))
    assert (mirror.complete, mirror.restarts) == (True, 1)


async def test_a_cleared_cache_is_a_restart(publisher: FakePublisher, tap: Tap) -> None:
    mirror = await tap()
    publisher.publish(stored(FIRST, 1), CLEARED)
    await eventually(lambda: mirror.restarts == 2)
    assert (mirror.keys, mirror.complete) == (set(), True)


async def test_a_batch_that_got_lost_is_asked_for(
    publisher: FakePublisher, tap: Tap, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await tap()
    publisher.publish(stored(FIRST, 1))
    publisher.lose(stored(SECOND, 2, parent=1))
    publisher.publish(stored(THIRD, 3, parent=2))
    await eventually(lambda: mirror.keys == set(KEYS))
    assert publisher.asked == [0, 1]
    assert (mirror.complete, mirror.restarts, warnings(caplog)) == (True, 1, [])


async def test_a_lost_batch_that_no_other_follows_is_found_by_asking_now_and_then(
    publisher: FakePublisher, tap: Tap
) -> None:
    mirror = await tap(check_interval=0.01)
    publisher.lose(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert (mirror.complete, mirror.restarts) == (True, 1)


async def test_what_is_lost_for_good_makes_the_rest_incomplete_until_the_cache_is_cleared(
    publisher: FakePublisher, tap: Tap, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await tap()
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    publisher.lose(removed(1))
    publisher.forget()
    publisher.publish(stored(FIRST, 4))
    await eventually(lambda: mirror.restarts == 2)
    assert (mirror.keys, mirror.complete) == ({KEYS[0]}, False)
    publisher.publish(CLEARED, stored(FIRST, 5))
    await eventually(lambda: mirror.complete)
    assert (mirror.keys, mirror.restarts) == ({KEYS[0]}, 3)
    (warning,) = warnings(caplog)
    assert "replica 3" in warning
    assert "estimated" in warning


async def test_what_is_known_is_complete_again_once_it_fills_the_engine(publisher: FakePublisher, tap: Tap) -> None:
    mirror = await tap(blocks=4)
    publisher.lose(stored(FIRST, 1))
    publisher.forget()
    publisher.publish(stored(FIRST, 1), stored(SECOND, 2, parent=1))
    await eventually(lambda: mirror.complete is False)
    publisher.publish(stored(THIRD, 3, parent=2))
    await eventually(lambda: mirror.complete)
    assert mirror.keys == set(KEYS)


async def test_a_malformed_batch_is_a_loss_that_is_said_once(
    publisher: FakePublisher, tap: Tap, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await tap()
    publisher.publish(stored(FIRST, 1))
    for _ in range(3):
        publisher.publish_raw(b"\xc1")
    publisher.publish(stored(SECOND + THIRD, 2, 3))
    await eventually(lambda: mirror.restarts == 4 and mirror.keys)
    assert mirror.complete is False
    assert len(warnings(caplog)) == 1


async def test_an_event_that_cannot_be_read_is_skipped_and_that_is_said_once(
    publisher: FakePublisher, tap: Tap, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await tap()
    for _ in range(3):
        publisher.publish({"type": "Nonsense"}, stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert (mirror.complete, mirror.restarts) == (True, 1)
    (warning,) = warnings(caplog)
    assert "one cannot be read and is skipped: Nonsense: " in warning


@pytest.mark.parametrize(
    "frames", [(b"",), (b"", b"short", b""), (b"", bytes(8), b"", b"")], ids=["one", "number", "four"]
)
async def test_messages_of_the_wrong_shape_are_ignored_and_said_once(
    publisher: FakePublisher, tap: Tap, caplog: pytest.LogCaptureFixture, frames: tuple[bytes, ...]
) -> None:
    mirror = await tap()
    publisher.say(*frames)
    publisher.say(*frames)
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert (mirror.complete, mirror.restarts) == (True, 1)
    assert len(warnings(caplog)) == 1


async def test_more_blocks_than_the_engine_has_are_a_sign_of_loss(publisher: FakePublisher, tap: Tap) -> None:
    mirror = await tap(blocks=1)
    publisher.publish(stored(TOKENS, 1, 2, 3))
    await eventually(lambda: mirror.complete is False)
    assert mirror.keys == set()


async def test_nobody_answering_is_said_once_and_what_comes_by_itself_counts(
    publisher: FakePublisher, tap: Tap, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.answers = False
    mirror = await tap(check_interval=0.01)
    await eventually(lambda: len(publisher.asked) > 3)
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert mirror.complete
    (warning,) = warnings(caplog)
    assert f"nobody answers at {publisher.replay_endpoint}" in warning


async def test_a_gap_that_nobody_fills_is_a_loss(publisher: FakePublisher, tap: Tap) -> None:
    publisher.answers = False
    mirror = await tap(check_interval=0.01)
    publisher.lose(stored(FIRST, 1))
    publisher.publish(stored(SECOND + THIRD, 2, 3))
    await eventually(lambda: mirror.complete is False)
    assert len(mirror.keys) == 2


async def test_without_a_replay_endpoint_batches_from_the_first_on_are_complete(
    publisher: FakePublisher, tap: Tap
) -> None:
    mirror = await tap(can_ask=False)
    assert mirror.complete is None
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.complete)
    publisher.lose(stored(SECOND, 2, parent=1))
    publisher.publish(stored(FIRST, 4))
    await eventually(lambda: mirror.complete is False)
    assert publisher.asked == []


async def test_a_new_engine_is_followed_from_its_beginning(publisher: FakePublisher, tap: Tap, tmp_path: Path) -> None:
    old = await tap()
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: old.keys == {KEYS[0]})
    successor = FakePublisher(tmp_path, "successor")
    mirror = Mirror()
    following = open_cache_tap(successor.ready_response(), mirror.take, "replica 3")
    assert following is not None
    await eventually(lambda: mirror.complete)
    assert (mirror.keys, mirror.restarts) == (set(), 1)
    following.close()
    successor.close()


async def test_a_closed_tap_says_nothing_more_and_may_be_closed_again(publisher: FakePublisher) -> None:
    mirror = Mirror()
    closed = open_cache_tap(publisher.ready_response(), mirror.take, "replica 3")
    assert closed is not None
    closed.close()
    closed.close()
    publisher.publish(stored(FIRST, 1))
    await asyncio.sleep(0)
    assert mirror.restarts == 0
