"""Filters the messages of a head to an engine of another process: requests, aborts and an allow-list of calls pass.

vLLM's engine core runs any method that a call names, even one that writes the weights to any path. Loading a LoRA
adapter is rejected if its files on this node differ from those on the head. Python stages use the same protocol.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from vllm_omni_plugin.errors import NOT_ALLOWED
from vllm_omni_plugin.vllm_api.codecs.stage_codec import CallMessage, StageCodec
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ABORT, ADD, UTILITY
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_mismatch
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

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
"""Methods of the engine core that heads call."""

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
"""Methods of workers that vLLM's server calls with `collective_rpc`. Its route `/collective_rpc` may call others."""

_MAX_NAME_CHARS = 100
_DEV_MODE = "VLLM_SERVER_DEV_MODE"
_call = msgspec.msgpack.Decoder(CallMessage)


class Rejection(NamedTuple):
    """Why a message must not reach the engine, and the answer for the head; empty if the message has no answer."""

    reason: str
    answer: Frames


MessageFilter = Callable[[Frames], Rejection | None]
"""Returns None if the message may pass."""


def reject(frames: Frames) -> Rejection | None:
    """The `MessageFilter` for engines. Raises nothing for any frames. Reads files of LoRA adapters."""
    try:
        kind = bytes(frames[0])
        if kind in (ADD, ABORT) and len(frames) > 1:
            return None
        if kind != UTILITY:
            return Rejection(f"heads send no message of type {kind!r}", ())
        _, call_id, method, args = _call.decode(frames[1])
    except (msgspec.MsgspecError, LookupError, RecursionError, UnicodeError, TypeError, ValueError) as error:
        return Rejection(f"it is not a valid message: {error}", ())
    if reason := _why_not_allowed(method, args):
        return Rejection(reason, StageCodec().encode_failure(call_id, NOT_ALLOWED + reason))
    if method == "add_lora" and (reason := _adapter_mismatch(args)):
        # Without NOT_ALLOWED, the head takes this as a failure of the replica: its state would differ from the others.
        return Rejection(reason, StageCodec().encode_failure(call_id, reason))
    return None


def _adapter_mismatch(args: list[Any]) -> str:
    try:
        (adapter,) = msgspec.convert(args, tuple[Adapter])
    except msgspec.ValidationError:
        # The engine reports what is wrong with the arguments.
        return ""
    return adapter_mismatch(adapter)


def _why_not_allowed(method: str, args: list[Any]) -> str:
    """Why a head may not make this call here; empty if it may."""
    if method not in ALLOWED_CALLS:
        return f"{method[:_MAX_NAME_CHARS]!r} is not a call that heads may make"
    if method != "collective_rpc":
        return ""
    called = args[0] if args else None
    if isinstance(called, str) and (called in ALLOWED_WORKER_CALLS or _is_dev_mode()):
        return ""
    name = called[:_MAX_NAME_CHARS] if isinstance(called, str) else "something that is not a name"
    return f"heads may call collective_rpc of {name} only if the replica's node was started with {_DEV_MODE}=1"


def _is_dev_mode() -> bool:
    """Whether this node allows any call of workers: vLLM's own variable, read as vLLM does."""
    value = os.environ.get(_DEV_MODE, "0").strip()
    return value.isdecimal() and int(value) != 0
