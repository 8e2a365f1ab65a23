"""Hits are predicted exactly: vLLM's own KV cache manager under random work, followed by what it reports."""

import random
from collections import deque

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.balancing.pool import PooledReplica
from vllm_omni_plugin.balancing import KvAwareBalancer, ReplicaLoad
from vllm_omni_plugin.replicas.kv_events.cached_blocks import CachedBlocks
from vllm_omni_plugin.replicas.kv_events.engine_events import decode_events
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

SIZE = 4
BLOCKS = 60
MAX_RUNNING = 4


class Engine:
    """vLLM's scheduling of blocks, without a scheduler: prompts are computed at once, answers token by token."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
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


@pytest.mark.parametrize("seed", range(8))
def test_predicted_hits_are_those_of_vllms_cache_manager(seed: int) -> None:
    init_none_hash(sha256)
    rng = random.Random(seed)
    engine, client, names, policy = Engine(), Client(seed), CachedBlocks(), KvAwareBalancer()
    replica = PooledReplica(0, ReplicaLoad(kv_blocks=BLOCKS, block_size=SIZE))
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
    assert names.copies <= BLOCKS
