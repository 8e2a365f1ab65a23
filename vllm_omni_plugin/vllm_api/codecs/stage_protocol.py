"""Messages between heads and Python stages: a request of our own, and outputs in the layout of vLLM's.

A stage's process does not import vLLM, which would take seconds and 360 MB. So the structs below repeat the fields of
vLLM's structs up to the last field that stages set; contract tests compare both.
"""

from typing import Annotated, Any, ClassVar

import msgspec

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
"""Type bytes of `EngineCoreRequestType`."""

STOP, ABORTED, ERROR = 0, 2, 3
"""Values of `FinishReason`."""

ENGINE_DEAD = b"ENGINE_CORE_DEAD"
"""The only frame of an engine that reports its own death."""

RAW_VIEW = 3
"""Code of the msgpack extension that holds the bytes of a small tensor."""

CONTENT_KEY = "omni"
"""Key of the `OutputContent` in `EngineCoreOutput.kv_transfer_params`."""


class StageRequest(msgspec.Struct, array_like=True):
    """The input of a Python stage: a whole input, or a chunk of a session. For fields without a note see `StageInput`.

    Attributes:
        request_id: the same for all chunks of a session.
        client_index: index of the output socket for the answer.
        resumable: further chunks may follow.
        last: with `resumable`: no further chunk with an input follows.
        tensor: once decoded, a `stage_codec.ReceivedTensor`.
        sampling: includes the sampling parameters of the stage.
        closing: it has no input, and ends the session.
        session_id: of the client's conversation, for policies.
    """

    request_id: str
    client_index: int = 0
    resumable: bool = False
    last: bool = True
    token_ids: list[int] | None = None
    text: str | None = None
    tensor: Any = None
    metadata: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    closing: bool = False
    session_id: str | None = None

    # Fields of an `EngineCoreRequest` that the head reads.
    sampling_params: ClassVar[None] = None
    pooling_params: ClassVar[None] = None
    abort_immediately: ClassVar[bool] = False


class OutputContent(msgspec.Struct, omit_defaults=True):
    """The parts of a `StageOutput` for which `EngineCoreOutput` has no field.

    Attributes:
        error: why the request failed, for the client; "" if it did not.
        status: with `error`, the HTTP status: 400 for an invalid request, 500 for a failure of the stage.
    """

    text: str = ""
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    metadata: dict[str, Any] = {}
    error: str = ""
    status: int = 0


class WireOutput(msgspec.Struct, array_like=True):
    """`EngineCoreOutput` up to the last field that stages set."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: None = None
    events: None = None
    kv_transfer_params: dict[str, OutputContent] | None = None


class SchedulerStats(msgspec.Struct):
    """The fields of vLLM's `SchedulerStats` that report load."""

    num_running_reqs: int
    num_waiting_reqs: int


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to a call. `result` is the type description, None for plain data, and the value."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class WireOutputs(msgspec.Struct, array_like=True):
    """`EngineCoreOutputs` up to the last field that stages set; `timestamp` in seconds of the monotonic clock."""

    engine_index: int = 0
    outputs: list[WireOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


PARALLEL_SIZES = (
    "world_size",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
)
_COUNTS = ("max_model_len", "num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_loras")


def ready_response(engine_index: int, **known: Any) -> bytes:
    """Encode an `EngineCoreReadyResponse`; fields that are not given are zero, as for a stage without a KV cache."""
    return msgspec.msgpack.encode(
        {
            **dict.fromkeys(_COUNTS, 0),
            **dict.fromkeys(PARALLEL_SIZES, 1),
            **dict.fromkeys(("dtype", "vllm_version", "instance_id"), ""),
            "data_parallel_rank": engine_index,
            "dp_stats_address": None,
            "supports_lora": False,
            **known,
        }
    )
