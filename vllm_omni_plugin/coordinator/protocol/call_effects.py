"""Operator calls: which of them heads tell each other, how they change the fleet's document, and what they leave."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.fleet_state import StageState
from vllm_omni_plugin.coordinator.protocol.head_messages import require_flat
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter
from vllm_omni_plugin.vllm_api.engine_messages.pause_state import EngineCall, PauseState

FORGET_LORA = "forget_lora"
"""Changes the document only: like vLLM's, engines keep an adapter that requests can no longer name."""

ABORT_CLIENT_REQUESTS = "abort_client_requests"
"""Aborts requests by the ids that their clients know, or all if it names none. Each head aborts its own."""

HEAD_CALLS = frozenset({ABORT_CLIENT_REQUESTS, FORGET_LORA})
"""Calls for the heads, which send them to no engine."""

REMOVE = "remove"
"""Removes one replica. The argument is its `ReplicaKey`."""

_MAX_CHARS = 128 * 1024
# Worker methods that belong to one request of one head.
_OF_ONE_REQUEST = frozenset({"release_late_interaction_query_cache"})
_TYPES: dict[str, Any] = {
    "add_lora": tuple[Adapter],
    ABORT_CLIENT_REQUESTS: tuple[list[str]],
    REMOVE: tuple[ReplicaKey],
}
_WITHOUT_STATE = frozenset({"reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "profile"})

_WEIGHT_UPDATES = frozenset(
    {
        "finish_weight_update",
        "reload_weights",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
"""Methods of vLLM's workers that change the weights. They are called with `collective_rpc`."""


def encode(method: str, args: Sequence[Any]) -> list[Any] | None:
    """Return the arguments as plain JSON; None if other heads need not make the call, or cannot be sent it."""
    is_known = method in _CHANGES or method in _WITHOUT_STATE or method in _TYPES
    if not is_known or method == FORGET_LORA or (method == "collective_rpc" and args[0] in _OF_ONE_REQUEST):
        return None
    try:
        plain: list[Any] = msgspec.to_builtins(list(args))
        decode(method, plain)
        require_flat(plain)
    except (TypeError, WireError):
        return None
    return plain if len(msgspec.json.encode(plain)) <= _MAX_CHARS else None


def decode(method: str, arguments: list[Any]) -> tuple[Any, ...]:
    """Return the arguments that `encode` wrote. Raises `WireError`. What only an engine reads is left to the engine."""
    if method not in _TYPES:
        if method not in _CHANGES and method not in _WITHOUT_STATE:
            raise WireError(f"not an operator call: {method}")
        return tuple(arguments)
    try:
        args: tuple[Any, ...] = msgspec.convert(arguments, _TYPES[method])
    except msgspec.ValidationError as error:
        raise WireError(f"not arguments of {method}: {error}") from error
    return args


def leaves_state(method: str, args: Sequence[Any]) -> bool:
    """Whether a call changes the document."""
    return method in _CHANGES and (method != "collective_rpc" or args[0] in _WEIGHT_UPDATES)


def changed(state: StageState, method: str, args: Sequence[Any], weights: str, all_fresh: bool) -> StageState:
    """The state after a call that some engine accepted.

    ``weights`` names the weights after an update; ``all_fresh``: no engine that is called had those of ``state``.
    """
    if method == "collective_rpc":
        return _with_new_weights(state, args, weights, all_fresh)
    return _CHANGES[method](state, *args)


def calls_between(told: StageState, wanted: StageState, is_resting: bool) -> list[EngineCall]:
    """The calls that bring an engine from the state that it was told to another one, but for the weights.

    No call undoes an adapter: an engine may keep it. No call ends a pause that no operator has ended. ``is_resting``:
    the engine says that it is paused or asleep.
    """
    calls: list[EngineCall] = [("add_lora", (adapter,)) for adapter in wanted.adapters if adapter not in told.adapters]
    calls += [("pin_lora", (lora_id,)) for lora_id in wanted.pinned if lora_id not in told.pinned]
    if wanted.weight_version not in (None, told.weight_version):
        calls.append(("set_weight_version", (wanted.weight_version,)))
    if not wanted.pause.was_set:
        return calls
    replay = wanted.pause.replay()
    if replay == told.pause.replay() and is_resting is bool(replay):
        return calls
    undo = told.pause.undo() if told.pause.replay() != replay else []
    if is_resting and not undo and not replay:
        undo = [("wake_up", (None,))]
    return calls + undo + replay


def _add_lora(state: StageState, adapter: Adapter) -> StageState:
    """An engine that already has the adapter need not load it again."""
    adapter = replace(adapter, load_inplace=False)
    others = tuple(each for each in state.adapters if each.lora_int_id != adapter.lora_int_id)
    return replace(state, adapters=(*others, adapter))


def _remove_lora(state: StageState, lora_id: int) -> StageState:
    return replace(
        state,
        adapters=tuple(adapter for adapter in state.adapters if adapter.lora_int_id != lora_id),
        pinned=tuple(each for each in state.pinned if each != lora_id),
    )


def _pin_lora(state: StageState, lora_id: int) -> StageState:
    # Current engines keep a forgotten adapter and can pin it, but an engine that attaches later does not have it.
    known = any(adapter.lora_int_id == lora_id for adapter in state.adapters)
    return replace(state, pinned=(*state.pinned, lora_id)) if known and lora_id not in state.pinned else state


def _set_weight_version(state: StageState, version: str) -> StageState:
    return replace(state, weight_version=version)


def _pause(change: Callable[..., None]) -> Callable[..., StageState]:
    def changed_pause(state: StageState, *args: Any) -> StageState:
        pause = replace(state.pause)
        change(pause, *args)
        return replace(state, pause=pause)

    return changed_pause


def _with_new_weights(state: StageState, args: Sequence[Any], weights: str, all_fresh: bool) -> StageState:
    """Which weights count after a call, and whether a fresh engine, with those of the files, can have them."""
    method = args[0]
    are_files, is_updating, reads_other_files = False, state.is_updating, state.reads_other_files
    is_complete = method == "finish_weight_update" and is_updating
    match method:
        case "reload_weights":
            names_path = _names_path(args)
            is_complete = all_fresh or names_path or not reads_other_files
            reads_other_files |= names_path
            # Otherwise they are those of the files again, which a fresh engine has, too.
            are_files = not reads_other_files
        case "start_weight_update":
            is_updating = True
        case "finish_weight_update" | "start_draft_weight_update":
            is_updating = False
    return replace(
        state,
        weights=weights,
        are_files=are_files,
        is_complete=is_complete,
        reads_other_files=reads_other_files,
        is_updating=is_updating,
    )


def _names_path(args: Sequence[Any]) -> bool:
    """Whether a call of `reload_weights` names the folder to read; later calls without one read that folder again."""
    _, _, arguments, named = args
    return len(arguments) > 1 or "weights_path" in named


_CHANGES: dict[str, Callable[..., StageState]] = {
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
    FORGET_LORA: _remove_lora,
    "pin_lora": _pin_lora,
    "set_weight_version": _set_weight_version,
    "collective_rpc": _with_new_weights,
    "pause_generation": _pause(PauseState.pause_generation),
    "pause_scheduler": _pause(PauseState.pause),
    "resume_scheduler": _pause(PauseState.resume),
    "sleep": _pause(PauseState.sleep),
    "wake_up": _pause(PauseState.wake_up),
    "release_kv_cache_memory": _pause(PauseState.release_kv_cache),
}
