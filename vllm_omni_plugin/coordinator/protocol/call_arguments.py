"""Operators' calls as heads and the coordinator pass them on: one form for each method, strictly decoded."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import require_flat
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter, AdapterId

FORGET_LORA = "forget_lora"
"""Recorded and not sent: engines keep an adapter that requests no longer can ask for, as vLLM's do."""

MANAGE_CALLS = frozenset({"drain", "resume", "remove"})
"""What an operator wants with one replica of another process; their argument is its `ReplicaKey`."""

_MAX_RPC_CHARS = 128 * 1024
_OF_ONE_REQUEST = frozenset({"release_late_interaction_query_cache"})
"""Methods of workers that belong to a request, whose engines are this head's own affair."""

_Level = Annotated[int, Meta(ge=0, le=2)]
_Mode = Literal["abort", "wait", "keep"]
_Tags = Annotated[list[Literal["weights", "kv_cache", "scheduling"]], Meta(max_length=3)]
_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_ARGUMENTS: dict[str, Any] = {
    "add_lora": tuple[Adapter],
    "remove_lora": tuple[AdapterId],
    FORGET_LORA: tuple[AdapterId],
    "pin_lora": tuple[AdapterId],
    "pause_generation": tuple[_Mode, bool],
    "pause_scheduler": tuple[_Mode, bool],
    "resume_scheduler": tuple[()],
    "sleep": tuple[_Level, _Mode],
    "wake_up": tuple[_Tags | None],
    "release_kv_cache_memory": tuple[()],
    "set_weight_version": tuple[_Text],
    "collective_rpc": tuple[_Text, float | None, list[Any], dict[str, Any]],
    "reset_prefix_cache": tuple[bool, bool],
    "reset_mm_cache": tuple[()],
    "reset_encoder_cache": tuple[()],
    **dict.fromkeys(MANAGE_CALLS, tuple[ReplicaKey]),
    "profile": tuple[bool, _Text | None, _Count | None, _Count | None],
}
_LONGER: dict[str, Any] = {"profile": tuple[bool, _Text | None, _Count | None, _Count | None, dict[str, Any]]}
"""With all arguments that it may have."""


def encode(method: str, args: Sequence[Any]) -> list[Any] | None:
    """The arguments as plain JSON, None where the call concerns no other head or cannot be told.

    Questions concern nobody else. What no engine would take is not told either: the caller's engines refuse it.
    """
    if method not in _ARGUMENTS or (method == "collective_rpc" and args[0] in _OF_ONE_REQUEST):
        return None
    try:
        plain: list[Any] = msgspec.to_builtins(list(args))
        decode(method, plain)
        require_flat(plain)
    except (TypeError, WireError):
        return None
    if method == "collective_rpc" and len(msgspec.json.encode(plain)) > _MAX_RPC_CHARS:
        return None
    return plain


def decode(method: str, arguments: Any) -> tuple[Any, ...]:
    """The arguments that `encode` wrote.

    Raises:
        WireError: there is no such call.
    """
    kind = _ARGUMENTS.get(method)
    if kind is None:
        raise WireError(f"not an operator's call: {method}")
    longer = _LONGER.get(method)
    if longer is not None and isinstance(arguments, list) and len(arguments) == len(get_args(longer)):
        kind = longer
    try:
        args: tuple[Any, ...] = msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"not arguments of {method}: {error}") from error
    return args
