"""What vLLM's own block pool and publisher report is what policies look prompts up by; no engine is needed for that."""

import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.balancing.pool import PooledReplica
from tests.fakes.conditions import eventually
from tests.replicas.cache_publisher import Mirror
from vllm_omni_plugin.balancing import KvAwareBalancer, ReplicaLoad
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.replicas.kv_events import cache_listener
from vllm_omni_plugin.replicas.kv_events.cache_listener import listen_to_cache
from vllm_omni_plugin.replicas.kv_events.cached_blocks import CachedBlocks
from vllm_omni_plugin.replicas.kv_events.engine_events import decode_events
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.launch.kv_event_settings import (
    remove_event_sockets,
    turn_on_cache_events,
    why_no_cache_events,
)

from .configs import vllm_config, write_model

SIZE = 4
TOKENS = list(range(50, 63))
BLOCKS = 3


def request(**other: Any) -> Request:
    return Request("r", TOKENS, SamplingParams(), None, block_hasher=get_request_block_hasher(SIZE, sha256), **other)


def image(offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier="digest", mm_position=PlaceholderRange(offset=offset, length=length)
    )


class Pool:
    """vLLM's pool of blocks, of which those of one request are cached."""

    def __init__(self, cached: Request) -> None:
        self.pool = BlockPool(16, True, SIZE, enable_kv_cache_events=True)
        self.blocks = self.pool.get_new_blocks(BLOCKS)
        self.pool.cache_full_blocks(cached, self.blocks, 0, 1, SIZE, 0)
        self.pool.cache_full_blocks(cached, self.blocks, 1, BLOCKS, SIZE, 0)

    def take(self) -> bytes:
        """What it has reported since the last time, as the publisher sends it."""
        return msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=self.pool.take_events()))


@pytest.fixture(autouse=True)
def hash_seed() -> None:
    init_none_hash(sha256)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({}, id="tokens"),
        pytest.param({"cache_salt": "salt"}, id="salt"),
        pytest.param({"lora_request": LoRARequest("adapter", 1, "/a")}, id="adapter"),
        pytest.param({"mm_features": [image(2, 7)]}, id="media"),
        pytest.param(
            {
                "lora_request": LoRARequest("adapter", 1, "/a"),
                "mm_features": [image(0, 3), image(3, 6)],
                "cache_salt": "salt",
            },
            id="all",
        ),
    ],
)
def test_reported_blocks_are_found_by_the_prompt_of_their_request(other: dict[str, Any]) -> None:
    cached = request(**other)
    task, _ = EngineApi().describe(cached)
    change = CachedBlocks().apply(decode_events(Pool(cached).take()))
    assert list(change.stored) == prompt_keys(task["prompt"], SIZE)
    assert len(change.stored) == BLOCKS


def test_blocks_that_a_connector_has_stored_elsewhere_leave_those_of_the_pool_known() -> None:
    # What vLLM's OffloadingConnector says of a block whose tokens it has forgotten.
    offloaded = BlockStored(
        block_hashes=[b"hash"],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
    )
    events = [offloaded, *Pool(request()).pool.take_events(), offloaded]
    batch = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=events))
    assert len(CachedBlocks().apply(decode_events(batch)).stored) == BLOCKS


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return vllm_config(write_model(tmp_path / "model"), enforce_eager=True)


@pytest.fixture
def published(config: Any) -> Iterator[ZmqEventPublisher]:
    """vLLM's publisher for an engine that is not the first one, configured by us."""
    turn_on_cache_events(config)
    publisher = EventPublisherFactory.create(config.kv_events_config, 3)
    assert isinstance(publisher, ZmqEventPublisher)
    yield publisher
    publisher.shutdown()
    remove_event_sockets(config)


async def test_vllms_publisher_is_followed_at_the_addresses_that_it_says(published: ZmqEventPublisher) -> None:
    ready = msgspec.msgpack.encode({"num_gpu_blocks": 16, "kv_events_config": published.get_publisher_config()})
    pool, mirror = Pool(request()), Mirror()
    published.publish(KVEventBatch(ts=0.0, events=pool.pool.take_events()))
    listener = listen_to_cache(ready, mirror.apply, "replica 3")
    cached = request()
    keys = prompt_keys(EngineApi().describe(cached)[0]["prompt"], SIZE)
    await eventually(lambda: mirror.keys == set(keys))
    pool.pool.free_blocks(reversed(pool.blocks))
    pool.pool.reset_prefix_cache()
    published.publish(KVEventBatch(ts=0.0, events=pool.pool.take_events()))
    await eventually(lambda: mirror.restarts == 2)
    assert (mirror.keys, mirror.complete) == (set(), True)
    assert listener is not None
    listener.close()


@pytest.mark.parametrize("on", [True, False])
def test_an_event_publisher_configured_by_the_user_is_kept(config: Any, on: bool, tmp_path: Path) -> None:
    mine = tmp_path / "socket"
    mine.touch()
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=on, endpoint=f"ipc://{mine}")
    before = repr(config.kv_events_config)
    turn_on_cache_events(config)
    remove_event_sockets(config)
    assert repr(config.kv_events_config) == before
    assert mine.exists()
    assert bool(why_no_cache_events(config)) is not on


def test_without_prefix_caching_nothing_is_turned_on_and_the_reason_is_told(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False
    turn_on_cache_events(config)
    remove_event_sockets(config)
    assert config.kv_events_config is None
    assert "prefix caching is off" in why_no_cache_events(config)


async def test_a_listener_that_missed_events_follows_its_publisher_again(
    config: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn_on_cache_events(config)
    config.kv_events_config.hwm = config.kv_events_config.buffer_steps = 10
    publisher = EventPublisherFactory.create(config.kv_events_config, 0)
    assert isinstance(publisher, ZmqEventPublisher)
    monkeypatch.setattr(cache_listener, "MAX_UNREAD", 10)
    ready = msgspec.msgpack.encode({"num_gpu_blocks": 16, "kv_events_config": publisher.get_publisher_config()})
    pool, mirror = Pool(request()), Mirror()
    listener = listen_to_cache(ready, mirror.apply, "replica 0")
    await eventually(lambda: mirror.complete)
    # More than sockets hold. Nothing is read until the publisher's thread has sent them all.
    padding = [BlockRemoved(block_hashes=[number], medium="GPU") for number in range(10_000)]
    for _ in range(300):
        publisher.publish(KVEventBatch(ts=0.0, events=padding))
    publisher._event_queue.join()

    def is_noticed_once_more_comes() -> bool:
        publisher.publish(KVEventBatch(ts=0.0, events=[]))
        return mirror.complete is False

    await eventually(is_noticed_once_more_comes)
    assert "some were lost" in caplog.text
    pool.pool.free_blocks(reversed(pool.blocks))
    pool.pool.reset_prefix_cache()
    cleared = pool.pool.take_events()

    def is_followed_once_cleared() -> bool:
        # Again each time: what is published while sockets are still full is dropped, too.
        publisher.publish(KVEventBatch(ts=0.0, events=cleared))
        return mirror.complete

    await eventually(is_followed_once_cleared)
    assert mirror.keys == set()
    assert listener is not None
    listener.close()
    publisher.shutdown()
    remove_event_sockets(config)


POOL_BLOCKS = 60
MAX_RUNNING = 4


class Engine:
    """vLLM's scheduling of blocks, without a scheduler: prompts are computed at once, answers token by token."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(POOL_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(config, 1000, SIZE, SIZE, enable_kv_cache_events=True)
        self._running: deque[Request] = deque()

    def add(self, request: Request) -> int:
        """Compute a prompt; returns how many of its tokens were cached."""
        while len(self._running) >= MAX_RUNNING:
            self.end()
        blocks, cached, _ = self._manager.get_computed_blocks(request)
        while self._manager.allocate_slots(request, request.num_tokens - cached, cached, blocks) is None:
            self.end()
        request.num_computed_tokens = request.num_tokens
        self._running.append(request)
        return cached

    def step(self, token: int) -> None:
        """Every answer grows by a token."""
        for request in list(self._running):
            request.append_output_token_ids(token)
            if self._manager.allocate_slots(request, 1) is None:
                self._running.remove(request)
                self._manager.free(request)
            else:
                request.num_computed_tokens += 1

    def end(self) -> None:
        self._manager.free(self._running.popleft())

    def reset(self) -> None:
        while self._running:
            self.end()
        assert self._manager.reset_prefix_cache()

    def report(self) -> bytes:
        """What has happened to the cache since the last report."""
        return msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=self._manager.take_events()))


class Client:
    """Makes prompts, most of which begin as others did."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        self._prompts: list[list[int]] = [[]]
        self._count = 0

    def ask(self) -> Request:
        rng = self._rng
        former = rng.choice(self._prompts[-12:])
        prompt = former[: rng.randint(0, len(former))] + [rng.randrange(99) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.2 and former:
            prompt = former
        self._prompts.append(prompt[:100])
        self._count += 1
        return Request(
            str(self._count),
            prompt[:100],
            SamplingParams(max_tokens=50),
            None,
            lora_request=LoRARequest("adapter", 1, "/a") if rng.random() < 0.2 else None,
            cache_salt="salt" if rng.random() < 0.2 else None,
            block_hasher=self._hasher,
        )

    def answered(self, request: Request) -> None:
        """The next turn of a conversation begins with this one and its answer."""
        self._prompts.append(list(request.all_token_ids)[:100])


@pytest.mark.parametrize("seed", range(3))
def test_predicted_hits_are_those_of_vllms_cache_manager(seed: int) -> None:
    init_none_hash(sha256)
    rng = random.Random(seed)
    engine, client, names, policy = Engine(), Client(seed), CachedBlocks(), KvAwareBalancer()
    replica = PooledReplica(0, ReplicaLoad(kv_blocks=POOL_BLOCKS, block_size=SIZE))
    predicted: list[int] = []
    actual: list[int] = []
    for _ in range(300):
        policy.cache_changed(replica, names.apply(decode_events(engine.report())))
        request = client.ask()
        predicted.append(policy.decide(EngineApi().describe(request)[0], (replica,)).matched_tokens)
        actual.append(engine.add(request))
        for _ in range(rng.randint(0, 6)):
            engine.step(rng.randrange(5))
        client.answered(request)
        if rng.random() < 0.01:
            engine.reset()
    assert predicted == actual
    assert sum(actual) > 1000
    assert names.copies <= POOL_BLOCKS
