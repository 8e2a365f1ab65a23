"""The listener knows what an engine has cached, through everything that can go wrong between them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.keeping import Keep
from tests.replicas.cache_publisher import BLOCK_SIZE, CLEARED, FakePublisher, Mirror, removed, stored
from vllm_omni_plugin.balancing import Prompt
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.replicas.kv_events import cache_listener
from vllm_omni_plugin.replicas.kv_events.cache_listener import listen_to_cache

TOKENS = list(range(12))
KEYS = prompt_keys(Prompt([*TOKENS, 0]), BLOCK_SIZE)
FIRST, SECOND, THIRD = (TOKENS[start : start + BLOCK_SIZE] for start in range(0, 12, BLOCK_SIZE))


@pytest.fixture
async def publisher(tmp_path: Path, keep: Keep) -> FakePublisher:
    return keep(FakePublisher(tmp_path))


Listen = Callable[..., Awaitable[Mirror]]


@pytest.fixture
async def listen(publisher: FakePublisher, keep: Keep) -> Listen:
    """Start a listener; waits until it has received the first replay."""

    async def follow(blocks: int = 1000, *, can_ask: bool = True) -> Mirror:
        mirror = Mirror()
        other = {} if can_ask else {"replay_endpoint": None}
        listener = listen_to_cache(publisher.ready_response(blocks, **other), mirror.apply, "replica 3")
        assert listener is not None
        keep(listener)
        await eventually(lambda: publisher.is_subscribed, "a subscription")
        if can_ask and publisher.answers:
            await eventually(lambda: mirror.restarts == 1, "the first answer")
        return mirror

    return follow


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_batches_from_before_the_subscription_are_replayed(publisher: FakePublisher, listen: Listen) -> None:
    publisher.publish(stored(TOKENS, 1, 2, 3))
    publisher.publish(removed(3))
    mirror = await listen()
    await eventually(lambda: mirror.keys == set(KEYS[:2]))
    assert (mirror.complete, mirror.restarts) == (True, 1)


async def test_a_lost_batch_is_replayed(
    publisher: FakePublisher, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await listen()
    publisher.publish(stored(FIRST, 1))
    publisher.lose(stored(SECOND, 2, parent=1))
    publisher.publish(stored(THIRD, 3, parent=2))
    await eventually(lambda: mirror.keys == set(KEYS))
    assert publisher.asked == [0, 1]
    assert (mirror.complete, mirror.restarts, warnings(caplog)) == (True, 1, [])


async def test_after_a_permanent_loss_the_cache_is_unknown_until_it_is_cleared(
    publisher: FakePublisher, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await listen()
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    publisher.lose(removed(1))
    publisher.forget()
    publisher.publish(stored(FIRST, 4))
    await eventually(lambda: mirror.restarts == 2)
    assert (mirror.keys, mirror.complete) == (set(), False)
    publisher.publish(CLEARED, stored(FIRST, 5))
    await eventually(lambda: mirror.complete)
    assert (mirror.keys, mirror.restarts) == ({KEYS[0]}, 3)
    (warning,) = warnings(caplog)
    assert "replica 3" in warning
    assert "estimated" in warning


async def test_a_malformed_batch_is_a_loss_and_logged_once(
    publisher: FakePublisher, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await listen()
    publisher.publish(stored(FIRST, 1))
    for _ in range(3):
        publisher.publish_raw(b"\xc1")
    publisher.publish(stored(SECOND + THIRD, 2, 3))
    await eventually(lambda: mirror.restarts == 2)
    assert (mirror.keys, mirror.complete, len(warnings(caplog))) == (set(), False, 1)


async def test_an_invalid_event_is_skipped_and_logged_once(
    publisher: FakePublisher, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = await listen()
    for _ in range(3):
        publisher.publish({"type": "Nonsense"}, stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert (mirror.complete, mirror.restarts) == (True, 1)
    (warning,) = warnings(caplog)
    assert "one cannot be read and is skipped: Nonsense: " in warning


@pytest.mark.parametrize(
    "frames", [(b"",), (b"", b"short", b""), (b"", bytes(8), b"", b"")], ids=["one", "number", "four"]
)
async def test_malformed_messages_are_ignored_and_logged_once(
    publisher: FakePublisher, listen: Listen, caplog: pytest.LogCaptureFixture, frames: tuple[bytes, ...]
) -> None:
    mirror = await listen()
    publisher.send_frames(*frames)
    publisher.send_frames(*frames)
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert (mirror.complete, mirror.restarts) == (True, 1)
    assert len(warnings(caplog)) == 1


async def test_more_blocks_than_the_engine_has_mean_a_loss(publisher: FakePublisher, listen: Listen) -> None:
    mirror = await listen(blocks=1)
    publisher.publish(stored(TOKENS, 1, 2, 3))
    await eventually(lambda: mirror.complete is False)
    assert mirror.keys == set()


async def test_a_gap_without_replay_is_a_loss(
    publisher: FakePublisher, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_listener, "MOST_MISSED", 3)
    publisher.answers = False
    mirror = await listen()
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.keys == {KEYS[0]})
    assert mirror.complete
    publisher.lose(removed(1))
    for _ in range(4):
        publisher.publish(stored(SECOND, 2))
    await eventually(lambda: mirror.complete is False)
    assert (mirror.keys, publisher.asked) == (set(), [0])


async def test_batches_during_a_replay_are_applied_once(publisher: FakePublisher, listen: Listen) -> None:
    mirror = await listen()
    for number in range(30):
        act = publisher.lose if number % 3 == 1 else publisher.publish
        act(stored(FIRST, number), removed(number))
    publisher.publish(stored(TOKENS, 51, 52, 53))
    await eventually(lambda: publisher.asked[-1] > 0)
    publisher.publish(removed(53))
    await eventually(lambda: mirror.keys == set(KEYS[:2]))
    assert (mirror.complete, mirror.restarts) == (True, 1)


async def test_without_a_replay_endpoint_a_gap_is_a_loss_at_once(publisher: FakePublisher, listen: Listen) -> None:
    mirror = await listen(can_ask=False)
    assert mirror.complete is None
    publisher.publish(stored(FIRST, 1))
    await eventually(lambda: mirror.complete)
    publisher.lose(stored(SECOND, 2, parent=1))
    publisher.publish(stored(FIRST, 4))
    await eventually(lambda: mirror.complete is False)
    assert publisher.asked == []


async def test_a_closed_listener_reports_nothing_and_can_be_closed_again(publisher: FakePublisher) -> None:
    mirror = Mirror()
    closed = listen_to_cache(publisher.ready_response(), mirror.apply, "replica 3")
    assert closed is not None
    closed.close()
    closed.close()
    publisher.publish(stored(FIRST, 1))
    await asyncio.sleep(0)
    assert mirror.restarts == 0
