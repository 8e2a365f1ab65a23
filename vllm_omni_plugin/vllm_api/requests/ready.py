"""What engines say of themselves when they are ready, applied to the front end's configuration."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.engine.core_client import MPClient

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.requests.engine_types import BatchLimits, CacheSize


def apply_ready_responses(vllm_config: Any, payloads: Iterable[bytes]) -> dict[int, Any]:
    """Bring `vllm_config` in line with what its engines found at start, exactly as vLLM's own client does.

    Block counts are summed into the configuration, so this is done once, for the replicas of the first start; one that
    is restarted has the same configuration and must not be counted again.

    Returns:
        The KV-event publisher configuration of each engine that has one, by engine index.
    """
    front_end = SimpleNamespace(
        vllm_config=vllm_config,
        _effective_attention_block_sizes=set(),
        _kv_event_sources={},
    )
    parallel_config = vllm_config.parallel_config
    own_port = parallel_config._coord_store_port
    try:
        for payload in payloads:
            # Each lockstep group has a coordinator and a store of its own, and vLLM expects one; here nobody uses any.
            front_end.stats_update_address = None
            front_end.coordinator_input_address = front_end.coordinator_output_address = None
            parallel_config._coord_store_port = 0
            MPClient._apply_ready_response(front_end, payload)
    finally:
        parallel_config._coord_store_port = own_port
    sources: dict[int, Any] = front_end._kv_event_sources
    return sources


def batch_limits(vllm_config: Any) -> BatchLimits:
    """What engines of this configuration put into one step at most."""
    scheduler = vllm_config.scheduler_config
    return BatchLimits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)


def cache_size(payload: bytes) -> CacheSize:
    """What a ready response says of the engine's KV memory.

    Blocks are those of full attention, whose size may differ from the configured one: the others are not shared.

    Raises:
        WireError: it is none, and cannot be given to `apply_ready_responses`.
    """
    try:
        ready = msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError(f"not a valid EngineCoreReadyResponse: {error}") from error
    for name in ("max_model_len", "num_gpu_blocks", "block_size"):
        if getattr(ready, name) < 0:
            raise WireError(f"not a valid EngineCoreReadyResponse: {name} is {getattr(ready, name)}")
    return CacheSize(ready.num_gpu_blocks, ready.effective_attention_block_size or ready.block_size)
