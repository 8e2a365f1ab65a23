"""The engine's side of vLLM's engine-core protocol, for engines that are simulated."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from vllm import __version__ as vllm_version
from vllm.lora.request import LoRARequest
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from vllm_omni_plugin.errors import WireError

Frames = Sequence[Any]

ENGINE_DEAD: bytes = EngineCoreProc.ENGINE_CORE_DEAD
"""The one frame with which an engine announces its own death."""

Kind = Literal["add", "abort", "call"]


class EngineSide:
    """Decodes what a front end sends and encodes what an engine answers. Not thread-safe."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._anything = MsgpackDecoder()

    def decode(self, frames: Frames) -> tuple[Kind, Any]:
        """What a message asks for: an `EngineCoreRequest`, a list of ids, or client index, call id, method, arguments.

        Raises:
            WireError: the frames are not such a message.
        """
        try:
            match EngineCoreRequestType(bytes(memoryview(frames[0]))):
                case EngineCoreRequestType.ADD:
                    return "add", self._requests.decode(frames[1:])
                case EngineCoreRequestType.ABORT:
                    return "abort", self._anything.decode(frames[1:])
                case EngineCoreRequestType.UTILITY:
                    return "call", self._anything.decode(frames[1:])
                case other:
                    raise WireError(f"a message of type {other.name}")
        except WireError:
            raise
        except Exception as error:  # vLLM's decode hooks raise whatever their payload makes them raise
            raise WireError(f"not a valid message to an engine: {error}") from error

    def encode_outputs(self, outputs: Sequence[Any], stats: Any | None, timestamp: float) -> Frames:
        """What one iteration has brought the requests of one client.

        Args:
            outputs: made by `output`.
            stats: made by `scheduler_stats`, for at most one client per iteration.
            timestamp: seconds of the monotonic clock.
        """
        message = EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats, timestamp=timestamp)
        return self._encoder.encode(message)  # type: ignore[no-any-return]

    def encode_result(self, call_id: int, result: Any) -> Frames:
        """The answer to a call."""
        return self._encode_answer(UtilityOutput(call_id, result=UtilityResult(result)))

    def encode_failure(self, call_id: int, message: str) -> Frames:
        """The answer to a call that failed."""
        return self._encode_answer(UtilityOutput(call_id, failure_message=message))

    def _encode_answer(self, answer: Any) -> Frames:
        return self._encoder.encode(EngineCoreOutputs(utility_output=answer))  # type: ignore[no-any-return]


def output(
    request_id: str, tokens: Sequence[int], finish: str | None, stop_token: int | None, prefill: Any | None
) -> Any:
    """The `EngineCoreOutput` of one step of an answer.

    Args:
        request_id: the id the front end gave it.
        tokens: new tokens.
        finish: a name of vLLM's `FinishReason` in lower case, or None.
        stop_token: the stop token that ended it, if any.
        prefill: with the first token; made by `prefill_fields`.
    """
    return EngineCoreOutput(
        request_id,
        list(tokens),
        finish_reason=None if finish is None else FinishReason[finish.upper()],
        stop_reason=stop_token,
        **(prefill or {}),
    )


def prefill_fields(queued_at: float, scheduled_at: float, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """What the first output of a request says of the time before: seconds of the monotonic clock, and tokens."""
    stats = PrefillStats()
    stats.set(prompt_tokens, num_local_cached_tokens=cached_tokens, num_external_cached_tokens=0)
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, queued_at),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled_at),
    ]
    return {"prefill_stats": stats, "events": events}


def scheduler_stats(
    running: int, waiting: int, kv_cache_usage: float, admitted: int, queried_tokens: int, cached_tokens: int
) -> Any:
    """The `SchedulerStats` of an iteration; the last three count since the one before."""
    return SchedulerStats(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        kv_cache_usage=kv_cache_usage,
        prefix_cache_stats=PrefixCacheStats(requests=admitted, queries=queried_tokens, hits=cached_tokens),
    )


def lora_id(fields: Any) -> int:
    """The id of an adapter from a `LoRARequest` that came as the argument of a call. Raises msgspec.ValidationError."""
    adapter: int = msgspec.convert(fields, LoRARequest).lora_int_id
    return adapter


def ready_response(vllm_config: Any, engine_index: int, kv_blocks: int, block_size: int) -> bytes:
    """What an engine with this configuration and this KV memory says of itself when it is ready."""
    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    lora = vllm_config.lora_config
    tokens = kv_blocks * block_size
    response = EngineCoreReadyResponse(
        max_model_len=model.max_model_len,
        num_gpu_blocks=kv_blocks,
        block_size=block_size,
        dp_stats_address=None,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version=vllm_version,
        world_size=parallel.world_size,
        data_parallel_size=parallel.data_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        data_parallel_rank=engine_index,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id=vllm_config.instance_id,
        supports_lora=lora is not None,
        max_loras=0 if lora is None else lora.max_loras,
        kv_cache_size_tokens=tokens,
        kv_cache_max_concurrency=tokens / model.max_model_len,
        effective_attention_block_size=block_size,
    )
    return msgspec.msgpack.encode(response)
