"""vLLM's engine-core protocol, and access to its request and output structs."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from math import inf
from operator import attrgetter
from random import Random, SystemRandom
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from vllm.sampling_params import _SAMPLING_EPS
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.pool.late_interaction import get_late_interaction_engine_index
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_plugin.balancing import MediaSpan, Prompt, Task
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.engine_messages import moving, ready
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames, LoadReport, Move
from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES

# An access to the value of an enum member takes two calls.
_ADD, _ABORT, _UTILITY = (
    kind.value for kind in (EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY)
)
_HASH_SPACE = 1 << 32
_SEED_BITS = 63
_ID_LIMIT = 2**31
"""Tokenizers and engines accept token ids below this."""
_COUNT_LIMIT = 2**32
"""vLLM's Rust front end reads numbers below this."""
_NUMBERS = "biuf"
"""Kinds of NumPy types that all front ends read."""
_STALE_WAVE = -1
"""Lower than every wave of a lockstep group: an idle rank then starts the next wave itself, and vLLM's coordinator
wakes the other ranks, so a head need not know the current wave. Other engines ignore it."""


class EngineApi:
    """Encodes messages to an engine, decodes its outputs, and reads and changes requests and outputs.

    Not thread-safe, as vLLM's encoder is not: use one per event loop. `vocabulary` is 0 if unknown.
    """

    _wave: Mapping[str, int] = {"current_wave": _STALE_WAVE}
    """Request fields that `encode_add` sets in every attempt."""
    schedules = True
    """Whether the engine computes requests in steps, so that one that goes without outputs for long has stalled."""

    def __init__(self, custom_processors: bool = False, random: Random | None = None, vocabulary: int = 0) -> None:
        self._custom_processors = custom_processors
        self.vocabulary = vocabulary or None
        self._random = random or SystemRandom()
        self._encoder = MsgpackEncoder()
        self._decoder = _outputs_decoder()

    awaits_cache = staticmethod(moving.awaits_cache)
    engine_size = staticmethod(ready.engine_size)
    transfers_cache = staticmethod(moving.transfers_cache)
    without_hand_over = staticmethod(moving.without_hand_over)
    continuation = staticmethod(moving.continuation)
    end_if_complete = staticmethod(moving.end_if_complete)
    trim_repeated = staticmethod(moving.trim_repeated)

    @property
    def pooling_task(self) -> str | None:
        """The task of all pooling requests; an engine dies of a wrong one. None: vLLM's server checks the task."""
        return None

    def encode_add(self, request: Any, engine_request_id: str, client_index: int = 0) -> Frames:
        """Frames that submit a request under the id of this attempt. Tensors are not copied."""
        attempt = msgspec.structs.replace(
            request, request_id=engine_request_id, client_index=client_index, **self._wave
        )
        return (_ADD, *self._encoder.encode(attempt))

    def encode_abort(self, engine_request_ids: Sequence[str]) -> Frames:
        """Frames that abort attempts; the engine ignores unknown ids."""
        return (_ABORT, *self._encoder.encode(list(engine_request_ids)))

    def encode_utility(self, call_id: int, method: str, args: tuple[Any, ...], client_index: int = 0) -> Frames:
        """Frames that call `method(*args)` on the engine; its reply has the `call_id`."""
        call = (client_index, call_id, method, args)
        return (_UTILITY, *self._encoder.encode(call))

    def decode_outputs(self, frames: Frames) -> Any:
        """Decode the `EngineCoreOutputs` of one message; raises WireError for other frames."""
        try:
            return self._decoder.decode(frames)
        except Exception as error:  # vLLM's decode hooks may raise anything for a wrong payload
            raise WireError(f"not a valid EngineCoreOutputs message: {error}") from error

    def is_engine_dead(self, frames: Frames) -> bool:
        """Whether the message is an engine's announcement of its death, which is not an `EngineCoreOutputs`."""
        return len(frames) == 1 and memoryview(frames[0]) == EngineCoreProc.ENGINE_CORE_DEAD

    def describe(self, request: Any) -> tuple[Task, int | None]:
        """The `Task` of a request for policies, and its affinity key if it is bound to one replica.

        Only the length of a prompt of embeddings counts: it has no tokens to hash. Late-interaction scoring caches the
        query's embeddings in one engine's worker, so the documents have the key of their query.
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
        pooling = request.pooling_params
        return task, None if pooling is None else get_late_interaction_engine_index(pooling, _HASH_SPACE)

    def cached_tokens(self, output: Any) -> int | None:
        """Prompt tokens that came from caches; None for all outputs of a request but the first."""
        stats = output.prefill_stats
        cached: int | None = None if stats is None else stats.num_cached_tokens
        return cached

    def set_cached_tokens(self, output: Any, cached_tokens: int) -> None:
        if output.prefill_stats is not None:
            output.prefill_stats.num_cached_tokens = cached_tokens

    def end(self, request_id: str) -> Any:
        """The `EngineCoreOutputs` that end a request as a stop token does, with no token."""
        return EngineCoreOutputs(
            outputs=[EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.STOP)]
        )

    def load_report(self, outputs: Any, clear: bool = False) -> LoadReport | None:
        """The engine's load; None if the message does not contain it.

        Args:
            clear: change the message, whose readers shall take the engine for idle: a head without requests there may
                get no other report that corrects this one.
        """
        stats = outputs.scheduler_stats
        if stats is None:
            return None
        waiting, running = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs, stats.num_running_reqs
        usage = stats.kv_cache_usage
        if clear:
            stats.num_waiting_reqs = stats.num_skipped_waiting_reqs = stats.num_running_reqs = 0
            stats.kv_cache_usage = 0.0
        return LoadReport(waiting, running, usage)

    def cut_short(self, output: Any) -> bool:
        """Whether the output ends its request early, with all turns of a streaming-input session."""
        return output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)

    def aborted(self, output: Any) -> bool:
        """Whether the engine ended the request because it was paused or put to sleep."""
        return bool(output.finish_reason == FinishReason.ABORT)

    def refused(self, output: Any) -> bool:
        return PAUSE_REFUSES.applies and output.error is not None and bool(output.error.retryable)

    def make_movable(self, request: Any) -> Any:
        """The request, or a copy with a seed if it could neither resume nor replay without a seed.

        With a seed, the engine needs a random generator for the request, and on some GPUs its batches lose the fast
        sampling kernel. So only requests that need a seed get one.
        """
        params = request.sampling_params
        if params is None or request.resumable or not _lacks_seed(params):
            return request
        replays = self._custom_processors or moving.depends_on_output(request)
        return self.with_seed(request) if replays else request

    def with_seed(self, request: Any) -> Any:
        """The request, or a copy with a seed if it samples without one. Thread-safe."""
        if not _lacks_seed(request.sampling_params):
            return request
        params = copy.copy(request.sampling_params)
        params.seed = self._random.getrandbits(_SEED_BITS)
        return msgspec.structs.replace(request, sampling_params=params)

    def how_to_move(self, request: Any) -> Move:
        return moving.how_to_move(request, self._custom_processors)

    def idle_report(self, engine_index: int) -> Any:
        """The `EngineCoreOutputs` of an idle engine, for the gauges of one that may report nothing any more."""
        return EngineCoreOutputs(engine_index=engine_index, scheduler_stats=SchedulerStats())


def _lacks_seed(params: Any) -> bool:
    return params.temperature >= _SAMPLING_EPS and params.seed is None


_prefill_counts = attrgetter(*[each.name for each in fields(PrefillStats)])


@dataclass
class _PrefillStats(PrefillStats):  # type: ignore[misc]
    """No front end can count tokens below 0, and no client asked for them: they are set to 0."""

    def __post_init__(self) -> None:
        counts = _prefill_counts(self)
        if not 0 <= min(counts) <= max(counts) < _COUNT_LIMIT:
            for each in fields(self):
                if not 0 <= getattr(self, each.name) < _COUNT_LIMIT:
                    setattr(self, each.name, 0)


@dataclass
class _SchedulerStats(SchedulerStats):  # type: ignore[misc]
    """Without what would make sums over replicas or time NaN, or let them fall: no client asked for these numbers."""

    def __post_init__(self) -> None:
        stats: Any = self
        # An engine may divide by zero blocks.
        if not 0.0 <= stats.kv_cache_usage <= 1.0:
            stats.kv_cache_usage = 0.0
        if events := stats.kv_cache_eviction_events:
            stats.kv_cache_eviction_events = [event for event in events if _can_be_summed(vars(event))]
        if not _can_be_summed(stats.kv_connector_stats):
            stats.kv_connector_stats = None
        if not _can_be_summed(stats.ec_connector_stats):
            stats.ec_connector_stats = None


def _can_be_summed(value: Any) -> bool:
    """Whether all numbers in plain data are finite and not below 0."""
    if isinstance(value, dict):
        return all(map(_can_be_summed, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_can_be_summed, value))
    return not isinstance(value, int | float) or 0 <= value < inf


def _checked(kind: Any, types: dict[Any, Any]) -> Any:
    """A data class with other types for some of its fields."""
    redefined = [(each.name, types.get(each.type, each.type), copy.copy(each)) for each in fields(kind)]
    return make_dataclass(kind.__name__, redefined, bases=(kind,))


class _OutputsDecoder(MsgpackDecoder):  # type: ignore[misc]
    def dec_hook(self, type_: Any, value: Any) -> Any:
        array = super().dec_hook(type_, value)
        if isinstance(array, np.ndarray) and array.dtype.kind not in _NUMBERS:
            raise ValueError(f"an array of {array.dtype}")
        return array


def _outputs_decoder() -> Any:
    """A decoder of `EngineCoreOutputs` that rejects numbers at which vLLM's front ends or another engine would fail.

    msgspec checks types and numbers while it decodes, at no cost. The shapes of arrays are not checked: for an invalid
    one, vLLM's front end fails only the request.
    """
    # Not the configured vocabulary size: a model's head may be wider.
    token = Annotated[int, Meta(ge=0, lt=_ID_LIMIT)]
    count = Annotated[int, Meta(ge=0, lt=_COUNT_LIMIT)]
    # Sums of times in metrics would be NaN for ever.
    seconds = Annotated[float, Meta(ge=0, lt=2.0**53)]
    event = msgspec.defstruct("CheckedEvent", [("timestamp", seconds)], bases=(EngineCoreEvent,))
    speculation = _checked(RequestSpecDecodeMetrics, {int: count, list[int]: GenericAlias(list, count)})
    options: dict[str, Any] = {"array_like": True, "omit_defaults": True, "gc": False}
    # Redefined fields keep their positions.
    output = msgspec.defstruct(
        "CheckedOutput",
        [
            ("new_token_ids", GenericAlias(list, token)),
            ("stop_reason", count | str | None, None),
            ("events", GenericAlias(list, event) | None, None),
            ("prefill_stats", _PrefillStats | None, None),
            ("num_nans_in_logits", count, 0),
            ("spec_decode_metrics", speculation | None, None),
        ],
        bases=(EngineCoreOutput,),
        **options,
    )
    outputs: Any = [
        ("outputs", GenericAlias(list, output), msgspec.field(default_factory=list)),
        ("scheduler_stats", _SchedulerStats | None, None),
        ("timestamp", seconds, 0.0),
    ]
    return _OutputsDecoder(msgspec.defstruct("CheckedOutputs", outputs, bases=(EngineCoreOutputs,), **options))
