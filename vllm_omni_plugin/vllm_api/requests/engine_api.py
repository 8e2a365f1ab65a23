"""vLLM's engine-core protocol and the few things read from and built of its request and output structs."""

import copy
from collections.abc import Mapping, Sequence
from random import Random, SystemRandom
from types import GenericAlias
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.sampling_params import _SAMPLING_EPS
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.pool.late_interaction import get_late_interaction_engine_index
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_plugin.balancing.interface import MediaSpan, Prompt, Task
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.requests import moving, ready
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport, Move
from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES

Frames = Sequence[Any]
"""Frames of one message, each anything that supports the buffer protocol (bytes, memoryview, zmq.Frame)."""

_HASH_SPACE = 1 << 32
_SEED_BITS = 63
_ID_LIMIT = 2**31
"""Tokenizers and engines take no token id from here on."""
_STALE_WAVE = -1
"""Before every wave of a lockstep group, so that a rank that stands still starts the next one itself and vLLM's
coordinator wakes the others: whoever sends requests need not know of waves. Other engines take no notice."""


class EngineApi:
    """Turns calls into frames for an engine's input, and frames of its output into vLLM's structs.

    Not thread-safe, as vLLM's encoder is not: one per event loop.

    Args:
        custom_processors: see `moving.has_custom_logits_processors`.
        random: seeds of requests that need one to be movable.
        vocabulary: number of the model's tokens; 0: unknown.
    """

    _wave: Mapping[str, int] = {"current_wave": _STALE_WAVE}
    """Fields of requests that are the same in all attempts."""

    def __init__(self, custom_processors: bool = False, random: Random | None = None, vocabulary: int = 0) -> None:
        self._custom_processors = custom_processors
        self.vocabulary = vocabulary or None
        self._random = random or SystemRandom()
        self._encoder = MsgpackEncoder()
        self._decoder = _outputs_decoder()

    cache_size = staticmethod(ready.cache_size)
    transfers_cache = staticmethod(moving.transfers_cache)
    continuation = staticmethod(moving.continuation)
    end_if_complete = staticmethod(moving.end_if_complete)
    trim_repeated = staticmethod(moving.trim_repeated)

    @property
    def pooling_task(self) -> str | None:
        """What all requests ask a pooling model for; one that does not know it dies. None: vLLM's server checks it."""
        return None

    def encode_add(self, request: Any, engine_request_id: str, client_index: int = 0) -> Frames:
        """Frames that submit an `EngineCoreRequest` under an id of this attempt's own. Its tensors are not copied.

        Args:
            request: what to submit; it is not changed.
            engine_request_id: the id under which the engine shall know it.
            client_index: which of the engine's output sockets shall answer.
        """
        attempt = msgspec.structs.replace(
            request, request_id=engine_request_id, client_index=client_index, **self._wave
        )
        return (EngineCoreRequestType.ADD.value, *self._encoder.encode(attempt))

    def encode_abort(self, engine_request_ids: Sequence[str]) -> Frames:
        """Frames that abort requests by the ids the engine knows them under; unknown ids are harmless to it."""
        return (EngineCoreRequestType.ABORT.value, *self._encoder.encode(list(engine_request_ids)))

    def encode_utility(self, call_id: int, method: str, args: tuple[Any, ...], client_index: int = 0) -> Frames:
        """Frames that call `method(*args)` on the engine; its reply carries `call_id` and comes on `client_index`."""
        call = (client_index, call_id, method, args)
        return (EngineCoreRequestType.UTILITY.value, *self._encoder.encode(call))

    def decode_outputs(self, frames: Frames) -> Any:
        """The `EngineCoreOutputs` of one message.

        Raises:
            WireError: the frames are not such a message.
        """
        try:
            return self._decoder.decode(frames)
        except Exception as error:  # vLLM's decode hooks raise whatever their payload makes them raise
            raise WireError(f"not a valid EngineCoreOutputs message: {error}") from error

    def is_engine_dead(self, frames: Frames) -> bool:
        """Whether an engine announces its own death, the one output that is not an `EngineCoreOutputs`."""
        return len(frames) == 1 and memoryview(frames[0]) == EngineCoreProc.ENGINE_CORE_DEAD

    def describe(self, request: Any) -> tuple[Task, int | None]:
        """What policies may know of an `EngineCoreRequest`, and the key that binds it to one replica, if anything does.

        A prompt of embeddings has no tokens to name blocks by: it counts by its length only. Late-interaction scoring
        caches the query's embeddings in one engine's worker, and its documents must follow: their key is the query's.
        """
        params, token_ids, features = request.sampling_params, request.prompt_token_ids, request.mm_features
        skips_cache = (params or request.pooling_params).skip_reading_prefix_cache
        task = Task(
            request_id=request.request_id,
            engine_inputs=request,
            sampling_params=params,
            prompt=Prompt(
                range(len(request.prompt_embeds)) if token_ids is None else token_ids,
                request.lora_request.lora_name if request.lora_request else "",
                request.cache_salt or "",
                tuple([MediaSpan(m.identifier, m.mm_position.offset, m.mm_position.length) for m in features])
                if features
                else (),
                request.prompt_embeds is None and not skips_cache,
            ),
            session=request.session_id,
            max_tokens=params.max_tokens if params else None,
        )
        return task, get_late_interaction_engine_index(request.pooling_params, _HASH_SPACE)

    def cached_tokens(self, output: Any) -> int | None:
        """Prompt tokens that the engine took from caches, told with a request's first output; else None."""
        stats = output.prefill_stats
        cached: int | None = None if stats is None else stats.num_cached_tokens
        return cached

    def set_cached_tokens(self, output: Any, cached_tokens: int) -> None:
        """Let a request's first output say that the engine took so many prompt tokens from caches."""
        if output.prefill_stats is not None:
            output.prefill_stats.num_cached_tokens = cached_tokens

    def end(self, request_id: str) -> Any:
        """The `EngineCoreOutputs` that end a request as a stop token does, without a token."""
        return EngineCoreOutputs(
            outputs=[EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.STOP)]
        )

    def load_report(self, outputs: Any) -> LoadReport | None:
        """What the engine says of its load, None if the message does not say."""
        stats = outputs.scheduler_stats
        if stats is None:
            return None
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        usage = stats.kv_cache_usage
        # Some engine may divide by no blocks. What is not a share tells nothing, and would poison every comparison.
        return LoadReport(waiting, stats.num_running_reqs, usage if 0.0 <= usage <= 1.0 else 0.0)

    def cut_short(self, output: Any) -> bool:
        """Whether an `EngineCoreOutput` ends its request for good, with all turns of a streaming-input session."""
        return output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)

    def aborted(self, output: Any) -> bool:
        """Whether the engine has ended the request because it was paused or put to sleep."""
        return bool(output.finish_reason == FinishReason.ABORT)

    def refused(self, output: Any) -> bool:
        """Whether the engine has not taken the request, because an operator has paused it."""
        return PAUSE_REFUSES.applies and output.error is not None and bool(output.error.retryable)

    def make_movable(self, request: Any) -> Any:
        """The request, or a copy with a seed if its answer could neither be resumed nor repeated without.

        A seed costs its engine a random generator for the request, and on some GPUs the fast sampling kernel for those
        batches that it is in. So only requests that need one get it.
        """
        params = request.sampling_params
        if params is None or params.temperature < _SAMPLING_EPS or params.seed is not None:
            return request
        if request.resumable or not (self._custom_processors or moving.depends_on_output(request)):
            return request
        params = copy.copy(params)
        params.seed = self._random.getrandbits(_SEED_BITS)
        return msgspec.structs.replace(request, sampling_params=params)

    def how_to_move(self, request: Any) -> Move:
        """How the request goes on elsewhere once part of its answer has been delivered."""
        return moving.how_to_move(request, self._custom_processors)

    def idle_report(self, engine_index: int) -> Any:
        """The `EngineCoreOutputs` of an engine with nothing waiting or running, for the gauges of one that is gone."""
        return EngineCoreOutputs(engine_index=engine_index, scheduler_stats=SchedulerStats())


def _outputs_decoder() -> Any:
    """A decoder of `EngineCoreOutputs` that refuses tokens over which vLLM's front end or another engine would fail.

    Types and token ids are checked by msgspec as it decodes, which costs nothing. Arrays are not looked into: over one
    that it cannot use, vLLM's front end fails its request.
    """
    # Not the vocabulary of the configuration, since the head of a model may be wider than that.
    token = Annotated[int, Meta(ge=0, lt=_ID_LIMIT)]
    options: dict[str, Any] = {"array_like": True, "omit_defaults": True, "gc": False}
    # Fields that are defined again keep their places.
    output = msgspec.defstruct(
        "Output", [("new_token_ids", GenericAlias(list, token))], bases=(EngineCoreOutput,), **options
    )
    outputs: Any = [("outputs", GenericAlias(list, output), msgspec.field(default_factory=list))]
    return MsgpackDecoder(msgspec.defstruct("Outputs", outputs, bases=(EngineCoreOutputs,), **options))
