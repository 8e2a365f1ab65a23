"""The listener knows what an engine has cached, through everything that can go wrong between them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.fakes.conditions import eventually
from tests.fakes.keeping import Keep
from tests.replicas.cache_publisher import BLOCK_SIZE, CLEARED, FakePublisher, Mirror, removed, stored
from vllm_omni_plugin.balancing import Prompt
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.replicas.kv_events import cache_listener
from vllm_omni_plugin.replicas.kv_events.cache_listener import listen_to_cache
from vllm_omni_plugin.replicas.kv_events.engine_events import CacheSource, find_cache_source, publishes_cache_events

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


def ready(**publisher: Any) -> bytes:
    return msgspec.msgpack.encode({"num_gpu_blocks": 9, "kv_events_config": publisher or None, "dtype": "float32"})


@pytest.mark.parametrize(
    ("said", "found"),
    [
        pytest.param(
            {"endpoint": "ipc:///run/a", "replay_endpoint": "ipc:///run/b", "publisher": "zmq"},
            CacheSource("ipc:///run/a", "ipc:///run/b", "", 9),
            id="ours",
        ),
        pytest.param(
            {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "kv"},
            CacheSource("tcp://127.0.0.1:5557", None, "kv", 9),
            id="the user's, without replay",
        ),
        pytest.param(
            {"endpoint": "tcp://[::]:5557", "replay_endpoint": "tcp://127.0.0.1:5558"},
            CacheSource("tcp://[::1]:5557", "tcp://127.0.0.1:5558", "", 9),
            id="the user's, on every address",
        ),
    ],
)
def test_a_local_publisher_is_found(said: dict[str, Any], found: CacheSource) -> None:
    assert publishes_cache_events(ready(**said))
    assert find_cache_source(ready(**said)) == found


@pytest.mark.parametrize("response", [ready(), b"", b'"ready"', msgspec.msgpack.encode([1])])
def test_an_engine_without_a_publisher_is_ignored(response: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert not publishes_cache_events(response)
    assert listen_to_cache(response, lambda _: None, "replica 0") is None
    assert caplog.records == []
    assert find_cache_source(response) is None


@pytest.mark.parametrize("endpoint", ["tcp://collector:5557", "inproc://events", "ipx://nonsense", "tcp://*:nonsense"])
async def test_an_unusable_publisher_is_logged_with_its_address(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = ready(endpoint=endpoint)
    assert publishes_cache_events(response)
    assert listen_to_cache(response, lambda _: None, "replica 0") is None
    (record,) = caplog.records
    assert "replica 0" in record.getMessage()
    assert endpoint.replace("*", "127.0.0.1") in record.getMessage()


async def test_a_listener_without_a_socket_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context:
        context.max_sockets = 1
        monkeypatch.setattr(zmq.Context, "instance", lambda: context)
        with context.socket(zmq.SUB):
            assert listen_to_cache(ready(endpoint="tcp://*:5557"), lambda _: None, "replica 0") is None
    assert "Too many open files" in caplog.text
