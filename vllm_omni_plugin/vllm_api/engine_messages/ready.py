"""Reads the ready responses of engines, and applies them to the front end's configuration."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.engine.core_client import MPClient

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

_COUNTS = ("max_model_len", "num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_loras")


def apply_ready_responses(vllm_config: Any, payloads: Iterable[bytes]) -> dict[int, Any]:
    """Update `vllm_config` with the ready responses of its engines, as vLLM's own client does.

    It adds up block counts, so call it once, for the first start of the replicas and not for restarts. Returns the
    KV-event publisher configurations by engine index.
    """
    front_end = SimpleNamespace(vllm_config=vllm_config, _effective_attention_block_sizes=set(), _kv_event_sources={})
    parallel_config = vllm_config.parallel_config
    own_port = parallel_config._coord_store_port
    try:
        for payload in payloads:
            # vLLM expects one coordinator and one store, and several lockstep groups have several. A head uses none.
            front_end.stats_update_address = None
            front_end.coordinator_input_address = front_end.coordinator_output_address = None
            parallel_config._coord_store_port = 0
            MPClient._apply_ready_response(front_end, payload)
    finally:
        parallel_config._coord_store_port = own_port
    sources: dict[int, Any] = front_end._kv_event_sources
    return sources


def engine_size(payload: bytes) -> EngineSize:
    """What an engine holds by its ready response; KV memory in blocks of full attention, the only ones that are shared.

    Raises WireError for an invalid response, which must not be passed to `apply_ready_responses`.
    """
    try:
        ready = msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError(f"not a valid EngineCoreReadyResponse: {error}") from error
    for name in _COUNTS:
        if getattr(ready, name) < 0:
            raise WireError(f"not a valid EngineCoreReadyResponse: {name} is {getattr(ready, name)}")
    block_size = ready.effective_attention_block_size or ready.block_size
    return EngineSize(
        ready.num_gpu_blocks,
        block_size,
        ready.max_num_batched_tokens,
        ready.max_num_seqs,
        ready.max_model_len,
        ready.max_loras,
    )
