"""Arguments of operator calls on the wire: one strictly decoded form for each method."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import require_flat
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter, AdapterId

FORGET_LORA = "forget_lora"
"""Recorded but not sent to engines: like vLLM's, they keep an adapter that requests can no longer name."""

ABORT_CLIENT_REQUESTS = "abort_client_requests"
"""Aborts requests by the ids that their clients know, or all if it names none. Each head aborts its own."""

HEAD_CALLS = frozenset({ABORT_CLIENT_REQUESTS, FORGET_LORA})
"""Calls for the heads, which send them to no engine."""

MANAGE_CALLS = frozenset({"drain", "resume", "remove"})
"""Calls for one replica. The argument is its `ReplicaKey`."""

_MAX_CHARS = 128 * 1024
_LONG = frozenset({"collective_rpc", ABORT_CLIENT_REQUESTS})
# Worker methods that belong to one request of one head.
_OF_ONE_REQUEST = frozenset({"release_late_interaction_query_cache"})

_Level = Annotated[int, Meta(ge=0, le=2)]
_Mode = Literal["abort", "wait", "keep"]
_Tags = Annotated[list[Literal["weights", "kv_cache", "scheduling"]], Meta(max_length=3)]
_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_ARGUMENTS: dict[str, Any] = {
    "add_lora": tuple[Adapter],
    "remove_lora": tuple[AdapterId],
    FORGET_LORA: tuple[AdapterId],
    ABORT_CLIENT_REQUESTS: tuple[list[str]],
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
# The form with the optional arguments.
_LONGER: dict[str, Any] = {"profile": tuple[bool, _Text | None, _Count | None, _Count | None, dict[str, Any]]}


def encode(method: str, args: Sequence[Any]) -> list[Any] | None:
    """Return the arguments as plain JSON, or None if other heads need not or cannot get the call.

    They need no queries. They cannot get arguments that are invalid, nested too deeply or too large.
    """
    if method not in _ARGUMENTS or (method == "collective_rpc" and args[0] in _OF_ONE_REQUEST):
        return None
    try:
        plain: list[Any] = msgspec.to_builtins(list(args))
        decode(method, plain)
        require_flat(plain)
    except (TypeError, WireError):
        return None
    if method in _LONG and len(msgspec.json.encode(plain)) > _MAX_CHARS:
        return None
    return plain


def decode(method: str, arguments: Any) -> tuple[Any, ...]:
    """Return the arguments that `encode` wrote. Raises `WireError` if there is no such call."""
    kind = _ARGUMENTS.get(method)
    if kind is None:
        raise WireError(f"not an operator call: {method}")
    longer = _LONGER.get(method)
    if longer is not None and isinstance(arguments, list) and len(arguments) == len(get_args(longer)):
        kind = longer
    try:
        args: tuple[Any, ...] = msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"not arguments of {method}: {error}") from error
    return args
