"""The engine's side of vLLM's engine-core protocol, for simulated engines."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from vllm import __version__ as vllm_version
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder

from vllm_omni_plugin.vllm_api.codecs import stage_protocol
from vllm_omni_plugin.vllm_api.codecs.stage_codec import StageCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames
from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES

if PAUSE_REFUSES.applies:
    from vllm.outputs import RequestError

ENGINE_DEAD: bytes = EngineCoreProc.ENGINE_CORE_DEAD
"""The single frame with which an engine announces its death."""


class EngineCoreCodec(StageCodec):
    """Decodes vLLM's `EngineCoreRequest` instead of `StageRequest`. Not thread-safe."""

    def __init__(self, request_type: type[EngineCoreRequest] = EngineCoreRequest) -> None:
        super().__init__()
        self._engine_requests = MsgpackDecoder(request_type)

    def _decode_request(self, frames: Frames) -> Any:
        return self._engine_requests.decode(frames)


def output(step: Any) -> Any:
    made = EngineCoreOutput(
        step.request_id,
        [] if step.token is None else [step.token],
        finish_reason=None if step.finish is None else FinishReason[step.finish.upper()],
        stop_reason=step.stop_token,
        new_logprobs=None if step.logprobs is None else _logprobs(*step.logprobs),
    )
    if (prefill := step.prefill) is not None:
        made.prefill_stats = PrefillStats()
        made.prefill_stats.set(
            prefill.prompt_tokens, num_local_cached_tokens=prefill.cached_tokens, num_external_cached_tokens=0
        )
        made.events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, prefill.queued_at),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, prefill.scheduled_at),
        ]
    return made


def _logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> LogprobsLists:
    """Of one position, whose token is the most probable one; the arrays are encoded as vLLM encodes them."""
    row = (1, len(tokens))
    return LogprobsLists(_array("<i4", tokens, row), _array("<f4", logprobs, row), _array("<i4", (1,), (1,)))


def _array(dtype: str, values: Sequence[float], shape: tuple[int, ...]) -> Any:
    return dtype, shape, msgspec.msgpack.Ext(stage_protocol.RAW_VIEW, np.array(values, dtype).tobytes())


def refusal(request_id: str) -> Any:
    """The `EngineCoreOutput` with which a paused engine refuses a request. Only where `PAUSE_REFUSES` applies."""
    message = "Generation is paused. Please retry after it resumes."
    error = RequestError(code="engine_paused", message=message, retryable=True)
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)


def scheduler_stats(report: Any) -> Any:
    return SchedulerStats(
        num_running_reqs=report.running,
        num_waiting_reqs=report.waiting,
        kv_cache_usage=report.kv_cache_usage,
        prefix_cache_stats=PrefixCacheStats(
            requests=report.admitted, queries=report.queried_tokens, hits=report.cached_tokens
        ),
    )


def lora_id(fields: Any) -> int:
    return int(msgspec.convert(fields, LoRARequest).lora_int_id)


def ready_response(vllm_config: Any, engine_index: int, kv_blocks: int, block_size: int) -> bytes:
    model, scheduler, lora = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.lora_config
    tokens = kv_blocks * block_size
    return stage_protocol.ready_response(
        engine_index,
        **{name: getattr(vllm_config.parallel_config, name) for name in stage_protocol.PARALLEL_SIZES},
        max_model_len=model.max_model_len,
        num_gpu_blocks=kv_blocks,
        block_size=block_size,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version=vllm_version,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id=vllm_config.instance_id,
        supports_lora=lora is not None,
        max_loras=0 if lora is None else lora.max_loras,
        kv_cache_size_tokens=tokens,
        kv_cache_max_concurrency=tokens / model.max_model_len,
        effective_attention_block_size=block_size,
    )
