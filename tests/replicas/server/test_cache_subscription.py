"""Heads know what the engine behind a replica server has cached, over the control link that they have anyway."""

import asyncio
import logging
from pathlib import Path

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.keeping import Keep
from tests.replicas.cache_publisher import BLOCK_SIZE, CLEARED, FakePublisher, Mirror, removed, stored
from tests.replicas.server.conftest import MakeHead, Node, StartNode
from tests.replicas.server.engines import ServedFakeLauncher
from tests.replicas.server.heads import Head
from vllm_omni_plugin.balancing import Prompt
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.control.lease_messages import CacheChanges, Expired, PollCache
from vllm_omni_plugin.replicas.kv_events.cache_log import BEGINNING, Cursor

SECRET = Secrets(["a secret that both ends know"])
TOKENS = list(range(8))
KEYS = prompt_keys(Prompt([*TOKENS, 0]), BLOCK_SIZE)


@pytest.fixture
async def publisher(tmp_path: Path, launcher: ServedFakeLauncher, keep: Keep) -> FakePublisher:
    publisher = keep(FakePublisher(tmp_path))
    launcher.ready = publisher.ready_response()
    return publisher


async def changes(head: Head) -> CacheChanges:
    message = await head.next_message()
    assert isinstance(message, CacheChanges), message
    return message


async def follow(head: Head, cursor: Cursor) -> None:
    await head.send_control(PollCache(head.attached.lease, cursor))


@pytest.mark.parametrize("secrets", [None, SECRET], ids=["open", "encrypted"])
async def test_a_head_receives_all_cached_blocks_and_later_changes(
    start_node: StartNode, make_head: MakeHead, publisher: FakePublisher, secrets: Secrets | None
) -> None:
    node = await start_node(secrets=secrets)
    publisher.publish(stored(TOKENS, 1, 2))
    mirror = Mirror()
    async with make_head(secrets).attached(await node.up()) as replica:
        replica.subscribe_cache(mirror.apply)
        await eventually(lambda: mirror.keys == set(KEYS))
        assert (mirror.complete, mirror.restarts) == (True, 1)
        publisher.publish(removed(2))
        await eventually(lambda: mirror.keys == {KEYS[0]})
        publisher.publish(CLEARED)
        await eventually(lambda: mirror.restarts == 2)
        assert (mirror.keys, mirror.complete) == (set(), True)


async def test_a_head_that_attaches_again_receives_all_blocks_again(
    publisher: FakePublisher, node: Node, make_head: MakeHead
) -> None:
    head, mirror = make_head(), Mirror()
    publisher.publish(stored(TOKENS, 1, 2))
    for attachments in (1, 2):
        async with head.attached(await node.up()) as replica:
            replica.subscribe_cache(mirror.apply)
            await eventually(lambda: mirror.keys == set(KEYS) and mirror.complete)
            assert mirror.restarts == attachments
        mirror.keys.clear()


async def test_a_restarted_engine_starts_with_an_empty_cache(
    publisher: FakePublisher, node: Node, make_head: MakeHead, launcher: ServedFakeLauncher, keep: Keep, tmp_path: Path
) -> None:
    head, mirror = make_head(), Mirror()
    info = await node.up()
    publisher.publish(stored(TOKENS, 1, 2))
    async with head.attached(info) as replica:
        replica.subscribe_cache(mirror.apply)
        await eventually(lambda: mirror.keys)
        successor = keep(FakePublisher(tmp_path, "successor"))
        launcher.ready = successor.ready_response()
        node.engine.process.kill()
        await eventually(lambda: head.deaths)
    async with head.attached(await node.up(after=info.incarnation)) as replica:
        replica.subscribe_cache(mirror.apply)
        await eventually(lambda: mirror.restarts == 2)
        assert (mirror.keys, mirror.complete) == (set(), True)


async def test_an_engine_without_cache_events_is_logged_and_attached(
    start_node: StartNode, make_head: MakeHead, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = await start_node()
    mirror = Mirror()
    async with make_head().attached(await node.up()) as replica:
        replica.subscribe_cache(mirror.apply)
        assert await replica.client.call("is_sleeping") is False
    assert mirror.restarts == 0
    assert "Replica 0.0 does not report what its prefix cache holds: it is estimated." in caplog.text


async def test_a_head_receives_no_changes_after_its_lease(publisher: FakePublisher, head: Head) -> None:
    await follow(head, BEGINNING)
    await follow(head, (await changes(head)).cursor)
    lease = head.attached.lease
    await head.detach()
    assert await head.renew() == Expired(lease)
    publisher.publish(stored(TOKENS, 1, 2))
    await asyncio.sleep(0)
    assert await head.renew() == Expired(lease)
