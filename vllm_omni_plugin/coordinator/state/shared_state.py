"""The engine state of a stage that operator calls have left, for replicas that attach later."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA, decode
from vllm_omni_plugin.coordinator.protocol.head_messages import StageState
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter
from vllm_omni_plugin.vllm_api.requests.pause_state import EngineCall, PauseState

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


@dataclass
class _State:
    loras: dict[int, Adapter] = field(default_factory=dict)
    pinned: dict[int, None] = field(default_factory=dict)
    rest: PauseState = field(default_factory=PauseState)
    weight_version: str | None = None
    weights_changed: bool = False
    # Whether a reload without a path reads other files than a fresh engine does.
    reads_other_files: bool = False
    # Whether an update of the whole model is open, which may also be one of its draft model only.
    is_updating: bool = False


@dataclass(eq=False, slots=True)
class _RecordedCall:
    method: str
    args: tuple[Any, ...]
    taken: bool = False

    def apply_to(self, state: _State) -> None:
        _RECORDERS[self.method](state, self.args)


class SharedState:
    """The engine state, from which the shortest list of calls that restores it is made.

    Calls overlap. Each recorded call stays open until its result and the results of all previous calls are known. Only
    then is it applied for good, so that a failed call has no effect on the others.
    ``rollbacks`` counts the calls and states that were taken back.
    """

    def __init__(self) -> None:
        self.rollbacks = 0
        self._state = _State()
        self._open: list[_RecordedCall] = []

    @property
    def weights_changed(self) -> bool:
        """Whether the weights were updated at run time, so that a fresh engine has others."""
        return self._current().weights_changed

    @property
    def sets_pause(self) -> bool:
        """Whether a call has said if engines pause or sleep. Otherwise they keep the state in which they are found."""
        return self._current().rest.was_set

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests can ask for."""
        return tuple(self._current().loras.values())

    @property
    def sleep_level(self) -> int:
        """The sleep level of the engines' weights; 0 when they are awake."""
        rest = self._current().rest
        return rest.sleep_level if "weights" in rest.asleep else 0

    @property
    def is_paused(self) -> bool:
        """Whether the engines schedule no requests, because they are paused or asleep."""
        rest = self._current().rest
        return rest.pause_mode is not None or bool(rest.asleep)

    def leaves_state(self, method: str, args: tuple[Any, ...]) -> bool:
        """Whether a call changes the state."""
        return method in _RECORDERS and (method != "collective_rpc" or args[0] in _WEIGHT_UPDATES)

    def completes_weight_update(self, method: str, args: tuple[Any, ...], all_fresh: bool) -> bool:
        """Whether all engines that accept this call now have the same weights after it, whichever they had.

        Args:
            all_fresh: none of them has got an update.
        """
        if method != "collective_rpc":
            return False
        state = self._current()
        if args[0] == "reload_weights":
            return all_fresh or _names_path(args) or not state.reads_other_files
        return args[0] == "finish_weight_update" and state.is_updating

    def record(self, method: str, args: tuple[Any, ...]) -> Callable[[bool], None]:
        """Record a call before it is sent. Call the returned function once with whether any replica accepted it."""
        if not self.leaves_state(method, args):
            return lambda taken: None
        call = _RecordedCall(method, args)
        self._open.append(call)
        return partial(self._settle, call)

    def replay(self) -> list[EngineCall]:
        """Return the calls that bring an engine to this state, if it is fresh or asleep as this state says."""
        state = self._current()
        calls: list[EngineCall] = [("add_lora", (lora,)) for lora in state.loras.values()]
        calls += [("pin_lora", (lora_id,)) for lora_id in state.pinned]
        if state.weight_version is not None:
            calls.append(("set_weight_version", (state.weight_version,)))
        return calls + state.rest.replay()

    def undo(self) -> list[EngineCall]:
        """Return the calls that resume and wake an engine of this state. Adapters stay."""
        return self._current().rest.undo()

    def snapshot(self, stage_id: int) -> StageState:
        """Return the state of a stage. Calls without a result count as accepted."""
        state = self.replay()
        if self.sets_pause and not self.undo():
            state.append(("resume_scheduler", ()))
        calls = [(method, to_builtins(list(args))) for method, args in state]
        return StageState(stage_id, calls, self.weights_changed)

    def adopt(self, snapshot: StageState) -> None:
        """Replace this state by a snapshot. Raises `WireError` if it is invalid; then nothing has changed."""
        state = _State(weights_changed=snapshot.weights_changed, reads_other_files=snapshot.weights_changed)
        for method, arguments in snapshot.replay:
            args = decode(method, arguments)
            if not self.leaves_state(method, args):
                raise WireError(f"{method} leaves no state")
            _RECORDERS[method](state, args)
        self._state = state
        self._open.clear()
        self.rollbacks += 1

    def _current(self) -> _State:
        state = deepcopy(self._state)
        for call in self._open:
            call.apply_to(state)
        return state

    def _settle(self, call: _RecordedCall, taken: bool) -> None:
        if call not in self._open:
            return
        call.taken = taken
        if not taken:
            self._open.remove(call)
            self.rollbacks += 1
        while self._open and self._open[0].taken:
            self._open.pop(0).apply_to(self._state)


def _add_lora(state: _State, args: tuple[Any, ...]) -> None:
    # An engine that already has it need not load it again.
    state.loras[args[0].lora_int_id] = replace(args[0], load_inplace=False)


def _remove_lora(state: _State, args: tuple[Any, ...]) -> None:
    state.loras.pop(args[0], None)
    state.pinned.pop(args[0], None)


def _pin_lora(state: _State, args: tuple[Any, ...]) -> None:
    # Current engines keep a forgotten adapter and can pin it, but an engine that attaches later does not have it.
    if args[0] in state.loras:
        state.pinned[args[0]] = None


def _set_weight_version(state: _State, args: tuple[Any, ...]) -> None:
    state.weight_version = args[0]


def _change_weights(state: _State, args: tuple[Any, ...]) -> None:
    match args[0]:
        case "reload_weights":
            state.reads_other_files |= _names_path(args)
            # Otherwise they are those of the files again, which a fresh engine has, too.
            state.weights_changed = state.reads_other_files
            return
        case "start_weight_update":
            state.is_updating = True
        case "finish_weight_update" | "start_draft_weight_update":
            state.is_updating = False
    state.weights_changed = True


def _names_path(args: tuple[Any, ...]) -> bool:
    """Whether a call of `reload_weights` names the folder to read; later calls without one read that folder again."""
    _, _, arguments, named = args
    return len(arguments) > 1 or "weights_path" in named


_RECORDERS: dict[str, Callable[[_State, tuple[Any, ...]], None]] = {
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
    FORGET_LORA: _remove_lora,
    "pin_lora": _pin_lora,
    "pause_generation": lambda state, args: state.rest.pause_generation(*args),
    "pause_scheduler": lambda state, args: state.rest.pause(*args),
    "resume_scheduler": lambda state, args: state.rest.resume(),
    "sleep": lambda state, args: state.rest.sleep(*args),
    "wake_up": lambda state, args: state.rest.wake_up(*args),
    "release_kv_cache_memory": lambda state, args: state.rest.release_kv_cache(),
    "set_weight_version": _set_weight_version,
    "collective_rpc": _change_weights,
}
