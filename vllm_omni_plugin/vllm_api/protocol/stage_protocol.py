"""What heads and Python stages say to each other: our own request, and vLLM's outputs written as vLLM writes them.

A stage's process speaks vLLM's engine-core protocol without importing vLLM, which would cost it seconds and 360 MB. So
the structs below repeat the layout of vLLM's as far as stages fill it; the contract tests compare both.
"""

from typing import Any, ClassVar

import msgspec

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
"""Type bytes of `EngineCoreRequestType`."""

STOP, ABORTED, ERROR = 0, 2, 3
"""Values of `FinishReason`."""

RAW_VIEW = 3
"""Type of the msgpack extension that holds the bytes of a small tensor."""

CONTENT_KEY = "omni"
"""Where in `EngineCoreOutput.kv_transfer_params` the `OutputContent` of an output is."""


class StageRequest(msgspec.Struct, array_like=True):
    """What a Python stage shall compute on: a whole input, or a chunk of a session.

    Attributes:
        request_id: repeated for the further chunks of a session.
        client_index: which of the engine's outputs answers.
        resumable: more of the session may follow.
        last: with `resumable`: what follows, if anything, only closes the session.
        token_ids: see `StageInput`; so are the next four.
        tensor: see there; once decoded, a `stage_codec.ReceivedTensor`.
        sampling: see there, over the sampling parameters of the stage.
        closing: nothing to compute on: it ends the session's input.
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

    # What else is asked of an `EngineCoreRequest` on its way, and is the same for all of these.
    sampling_params: ClassVar[None] = None
    pooling_params: ClassVar[None] = None
    abort_immediately: ClassVar[bool] = False


class OutputContent(msgspec.Struct, omit_defaults=True):
    """What of a stage's output has no place of its own in an `EngineCoreOutput`.

    Attributes:
        text: see `StageOutput`; so are the next two.
        error: why the request failed, for the client; "" if it did not.
        status: with `error`, the HTTP status: 400 if the request is at fault, 500 if the stage is.
    """

    text: str = ""
    token_ids: list[int] = []
    metadata: dict[str, Any] = {}
    error: str = ""
    status: int = 0


class WireOutput(msgspec.Struct, array_like=True):
    """`EngineCoreOutput` up to the last field that stages fill."""

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
    """The load report of vLLM's `SchedulerStats`."""

    num_running_reqs: int
    num_waiting_reqs: int


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to a call; before the result comes the description of its type, None for plain data."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class WireOutputs(msgspec.Struct, array_like=True):
    """`EngineCoreOutputs` up to the last field that stages fill; `timestamp` in seconds of the monotonic clock."""

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
    """An `EngineCoreReadyResponse` with these fields; of a stage none, which has no model length and no KV cache."""
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
