"""The Python stage's side of the engine-core protocol. Importing this module imports neither vLLM nor torch."""

import importlib
import math
from typing import Any, Literal, NamedTuple

import msgspec

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import (
    ABORT,
    ADD,
    RAW_VIEW,
    UTILITY,
    StageRequest,
    UtilityOutput,
    WireOutputs,
)
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

Kind = Literal["add", "abort", "call"]
CallMessage = tuple[int, int, str, list[Any]]
"""Client index, call id, method, arguments."""

_INLINE_BYTES = 256
"""Tensors below this size are part of the message, larger ones are frames of their own; vLLM's default."""


class ReceivedTensor(NamedTuple):
    """A tensor that has not been decoded; `data` holds its bytes."""

    dtype: str
    shape: list[int]
    data: Any

    def to_torch(self) -> Any:
        """The tensor; it shares memory with the message. Raises any exception for an invalid tensor. Imports torch."""
        torch = _torch()
        dtype = getattr(torch, self.dtype)
        buffer = memoryview(self.data)
        if buffer.nbytes != math.prod(self.shape) * dtype.itemsize:
            raise ValueError(f"{buffer.nbytes} bytes are not a tensor {self.shape} of {self.dtype}")
        if not buffer.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(self.shape)


class StageCodec:
    """Decodes messages of heads and encodes the answers of a stage. Not thread-safe."""

    def __init__(self) -> None:
        self._requests = msgspec.msgpack.Decoder(StageRequest, ext_hook=_raw_view)
        self._ids = msgspec.msgpack.Decoder(list[str])
        self._calls = msgspec.msgpack.Decoder(CallMessage)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_tensor)
        self._frames: list[Any] = []

    def decode(self, frames: Frames) -> tuple[Kind, Any]:
        """Decode a `StageRequest` (with a `ReceivedTensor`), ids to abort, or a `CallMessage`. Raises WireError."""
        try:
            kind, body = bytes(frames[0]), frames[1]
            if kind == ADD:
                return "add", self._decode_request(frames[1:])
            if kind == ABORT:
                return "abort", self._ids.decode(body)
            if kind == UTILITY:
                return "call", self._calls.decode(body)
        except Exception as error:  # vLLM's checks and decode hooks raise whatever their payload makes them raise
            raise WireError(f"not a valid message to an engine: {error}") from error
        raise WireError(f"a message of type {kind!r}")

    def encode_outputs(self, outputs: list[Any], stats: Any | None, timestamp: float) -> Frames:
        """Encode outputs for one client; both `outputs` and `stats` may be vLLM's or ours.

        Large tensors are not copied: their memory must not change. `timestamp` is in monotonic seconds.
        """
        return self._encode(WireOutputs(outputs=outputs, scheduler_stats=stats, timestamp=timestamp))

    def encode_result(self, call_id: int, result: Any) -> Frames:
        return self._encode(WireOutputs(utility_output=UtilityOutput(call_id, result=(None, result))))

    def encode_failure(self, call_id: int, message: str) -> Frames:
        return self._encode(WireOutputs(utility_output=UtilityOutput(call_id, failure_message=message)))

    def _decode_request(self, frames: Frames) -> Any:
        request = self._requests.decode(frames[0])
        if request.tensor is not None:
            request.tensor = _received(request.tensor, frames)
        return request

    def _encode(self, outputs: WireOutputs) -> Frames:
        self._frames = frames = [b""]
        frames[0] = self._encoder.encode(outputs)
        self._frames = []
        return frames

    def _encode_tensor(self, tensor: Any) -> Any:
        data = _bytes_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if data.nbytes < _INLINE_BYTES:
            return dtype, tuple(tensor.shape), msgspec.msgpack.Ext(RAW_VIEW, data)
        self._frames.append(data)
        return dtype, tuple(tensor.shape), len(self._frames) - 1


def sendable(tensor: Any) -> Any:
    """The tensor on the CPU, contiguous, without gradients; copied only if necessary. Raises if it is not dense."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    _bytes_of(dense)
    return dense


def _bytes_of(tensor: Any) -> memoryview:
    return memoryview(tensor.reshape(-1).view(_torch().uint8).numpy()) if tensor.numel() else memoryview(b"")


def _received(encoded: Any, frames: Frames) -> ReceivedTensor:
    dtype, shape, data = encoded
    return ReceivedTensor(dtype, shape, frames[data] if isinstance(data, int) else bytearray(data))


def _torch() -> Any:
    # Imported late: it is most of a stage's memory, and only stages with tensors need it.
    return importlib.import_module("torch")


def _raw_view(code: int, data: memoryview) -> Any:
    if code != RAW_VIEW:
        raise NotImplementedError(f"extension type {code}")
    return data
