"""What a head may send to an engine of another process: requests, aborts, and the calls that heads of ours make.

vLLM's engine core runs whichever of its methods a call names, such as one that writes the weights to any path. A lease
is not meant for that. Nor may an adapter be loaded whose files here are not those of the head. Python stages speak the
same protocol.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_omni_plugin.errors import NOT_ALLOWED
from vllm_omni_plugin.vllm_api.protocol.stage_codec import Call, StageCodec
from vllm_omni_plugin.vllm_api.protocol.stage_protocol import ABORT, ADD, UTILITY
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter, why_other_files

Frames = Sequence[Any]

ALLOWED_CALLS = frozenset(
    {
        "add_lora",
        "collective_rpc",
        "compute_weight_checksums",
        "get_supported_tasks",
        "get_weight_version",
        "is_scheduler_paused",
        "is_sleeping",
        "list_loras",
        "pause_generation",
        "pause_scheduler",
        "pin_lora",
        "profile",
        "release_kv_cache_memory",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume_scheduler",
        "set_weight_version",
        "sleep",
        "wake_up",
    }
)
"""Methods of the engine core that `FleetClient` calls for AsyncLLM, or the head for itself."""

ALLOWED_WORKER_CALLS = frozenset(
    {
        "checkpoint_prepare",
        "checkpoint_restore",
        "finish_weight_update",
        "init_weight_transfer_engine",
        "release_late_interaction_query_cache",
        "reset_weights",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
"""Methods of workers that vLLM's server calls by `collective_rpc`; its route `/collective_rpc` may call any."""

_MAX_NAME_CHARS = 100
_DEV_MODE = "VLLM_SERVER_DEV_MODE"
_call = msgspec.msgpack.Decoder(Call)


class Rejection(NamedTuple):
    """A message that must not reach the engine.

    Attributes:
        reason: why, for the log.
        answer: what its sender is to get in place of the engine's answer; empty if it waits for none.
    """

    reason: str
    answer: Frames


MessageFilter = Callable[[Frames], Rejection | None]
"""What `reject` is."""


def reject(frames: Frames) -> Rejection | None:
    """Why a message may not reach the engine, None if it may. Raises nothing, whatever the frames are.

    Reads the files of an adapter that is to be loaded, and nothing else.
    """
    try:
        kind = bytes(frames[0])
        if kind in (ADD, ABORT) and len(frames) > 1:
            return None
        if kind != UTILITY:
            return Rejection(f"heads send no message of type {kind!r}", ())
        _, call_id, method, args = _call.decode(frames[1])
    except (msgspec.MsgspecError, LookupError, RecursionError, UnicodeError, TypeError, ValueError) as error:
        return Rejection(f"it is no valid message: {error}", ())
    reason = _why_not(method, args)
    if reason is not None:
        return _refusal(call_id, reason, NOT_ALLOWED + reason)
    if method == "add_lora" and (reason := _other_files(args)):
        # A failure, not a call that is not allowed: this replica would have another state than the others.
        return _refusal(call_id, reason, reason)
    return None


def _refusal(call_id: int, reason: str, told: str) -> Rejection:
    return Rejection(reason, StageCodec().encode_failure(call_id, told))


def _other_files(args: list[Any]) -> str:
    try:
        (adapter,) = msgspec.convert(args, tuple[Adapter])
    except msgspec.ValidationError:
        # The engine says what is wrong with it.
        return ""
    return why_other_files(adapter)


def _why_not(method: str, args: list[Any]) -> str | None:
    if method not in ALLOWED_CALLS:
        return f"{method[:_MAX_NAME_CHARS]!r} is no call that heads may make"
    if method != "collective_rpc":
        return None
    called = args[0] if args else None
    if isinstance(called, str) and (called in ALLOWED_WORKER_CALLS or _is_dev_mode()):
        return None
    name = called[:_MAX_NAME_CHARS] if isinstance(called, str) else "something that is no name"
    return f"collective_rpc of {name} is only allowed to heads where the replica's node was started with {_DEV_MODE}=1"


def _is_dev_mode() -> bool:
    # As vLLM reads it; it takes nothing but numbers.
    value = os.environ.get(_DEV_MODE, "0").strip()
    return value.isdecimal() and int(value) != 0
