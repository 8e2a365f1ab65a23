"""The messages between vLLM's Rust front end and what it takes for one engine. For vLLM 0.33 or newer."""

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.vllm_api.codecs.sim_protocol import EngineCoreCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

IDENTITY = (0).to_bytes(2, "little")
"""ZMQ identity of the only engine."""

VALIDATION_ERROR = "validation_error"
"""The code of a `RequestError` that the front end answers with 400 and the message."""
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 1024
_AS_IS: dict[str, Any] = {"builtin_types": (bytes, bytearray, memoryview)}
_UNAVAILABLE = "unavailable"
_FAILED = "internal_error"


class FrontEndCodec:
    """Decodes what the front end sends to an engine, and encodes what it gets. Not thread-safe.

    `decode` is that of `StageCodec`, with an `EngineCoreRequest` whose sampling parameters `read_params` decodes.
    """

    def __init__(self) -> None:
        request = msgspec.defstruct(
            "FrontEndRequest",
            [("sampling_params", msgspec.Raw)],
            bases=(EngineCoreRequest,),
            array_like=True,
            omit_defaults=True,
            gc=False,
        )
        self.decode = EngineCoreCodec(request).decode
        self._encoder = MsgpackEncoder()
        self._sampling_params = msgspec.msgpack.Decoder(SamplingParams | None)
        self._known: dict[bytes, SamplingParams | None] = {}

    def read_params(self, request: Any) -> None:
        """Decode the sampling parameters of a request, which are those of an earlier one if they are equal.

        vLLM checks and completes them in Python whenever they are decoded, which took half of the time of a request.
        Raises StageInputError with vLLM's reason if it refuses them.
        """
        encoded = bytes(request.sampling_params)
        if encoded in self._known:
            request.sampling_params = self._known[encoded]
            return
        try:
            params = request.sampling_params = self._sampling_params.decode(encoded)
        except (msgspec.ValidationError, VLLMClientError) as error:
            raise StageInputError(str(error)) from error
        if len(encoded) <= _MAX_KNOWN_BYTES:
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            self._known[encoded] = params

    def encode_outputs(self, outputs: Any) -> Frames:
        """Encode the outputs of one engine. Tensors are not copied.

        Nothing else goes along: one message that the front end does not expect, such as an empty one or one about waves
        of a lockstep group, makes it fail all its requests for ever.
        """
        kept = EngineCoreOutputs(
            outputs=outputs.outputs, timestamp=outputs.timestamp, weight_version=outputs.weight_version
        )
        frames: Frames = self._encoder.encode(kept)
        return frames

    def encode_statistics(self, stats: Any) -> Frames:
        """Encode vLLM's `SchedulerStats` of the only engine. Numbers below 0, which it cannot read, are sent as 0."""
        return self._encode(EngineCoreOutputs(scheduler_stats=_not_below_0(msgspec.to_builtins(stats, **_AS_IS))))

    def encode_result(self, call_id: int, result: Any) -> Frames:
        """Encode the answer to a call, with the types that vLLM's client restores."""
        return self._encode(EngineCoreOutputs(utility_output=UtilityOutput(call_id, result=UtilityResult(result))))

    def encode_failure(self, call_id: int, message: str) -> Frames:
        return self._encode(EngineCoreOutputs(utility_output=UtilityOutput(call_id, failure_message=message)))

    def encode_refusal(self, request_id: str, message: str, *, retryable: bool) -> Frames:
        """Encode the end of a request with an error for its client: 503 with the message, or 500 without it."""
        return self._encode_error(request_id, _UNAVAILABLE if retryable else _FAILED, message, retryable)

    def encode_invalid(self, request_id: str, message: str) -> Frames:
        """Encode the end of a request that is invalid: 400 with the message."""
        return self._encode_error(request_id, VALIDATION_ERROR, message, False)

    def encode_aborted(self, request_ids: Sequence[str]) -> Frames:
        """Encode the end of requests with the finish reason "abort"."""
        return self._encode(
            EngineCoreOutputs(outputs=[_end(request_id, FinishReason.ABORT) for request_id in request_ids])
        )

    def _encode(self, outputs: EngineCoreOutputs) -> Frames:
        frames: Frames = self._encoder.encode(outputs)
        return frames

    def _encode_error(self, request_id: str, code: str, message: str, retryable: bool) -> Frames:
        # Earlier versions of vLLM have neither the class nor a Rust front end that reads it.
        from vllm.outputs import RequestError

        output = _end(request_id, FinishReason.ERROR)
        output.error = RequestError(code, message, retryable)
        return self._encode(EngineCoreOutputs(outputs=[output]))


def _not_below_0(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _not_below_0(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_not_below_0(each) for each in value]
    return max(value, 0) if type(value) is int else value


def _end(request_id: str, reason: FinishReason) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=reason)


def as_only_engine(ready_responses: Sequence[bytes]) -> bytes:
    """The ready response of an engine in whose place several serve.

    It has the shortest length, all workers, no ranks and no coordinator.

    Raises as msgspec does.
    """
    engines = [msgspec.msgpack.decode(response, type=EngineCoreReadyResponse) for response in ready_responses]
    only = engines[0]
    only.max_model_len = min(engine.max_model_len for engine in engines)
    only.world_size = sum(engine.world_size for engine in engines)
    only.data_parallel_size, only.data_parallel_rank = 1, 0
    only.dp_stats_address = only.coordinator_input_address = only.coordinator_output_address = None
    only.coord_store_port, only.kv_events_config = 0, None
    return msgspec.msgpack.encode(only)
