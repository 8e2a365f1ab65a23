"""What the engines of a stage have been told and a replica that attaches later must be told too."""

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
from vllm_omni_plugin.vllm_api.requests.pause_state import Call, PauseState

_WEIGHT_UPDATES = frozenset(
    {"start_weight_update", "update_weights", "finish_weight_update", "reload_weights", "reset_weights"}
)


@dataclass
class _Facts:
    """The state itself, apart from how it is recorded."""

    loras: dict[int, Adapter] = field(default_factory=dict)
    pinned: dict[int, None] = field(default_factory=dict)
    rest: PauseState = field(default_factory=PauseState)
    weight_version: str | None = None
    weights_changed: bool = False


@dataclass(eq=False, slots=True)
class _Note:
    """A recorded call, and whether replicas have taken it yet."""

    method: str
    args: tuple[Any, ...]
    taken: bool = False

    def apply_to(self, facts: _Facts) -> None:
        _RECORDERS[self.method](facts, self.args)


class SharedState:
    """The engine state that past calls have left, as the shortest list of calls that makes it again.

    Calls overlap, so each is kept as a note until it and all before it are settled; only then is it part of the state
    for good, and one that is refused leaves no trace in what the others have made.

    Attributes:
        refusals: how often what had been recorded was taken back.
    """

    def __init__(self) -> None:
        self.refusals = 0
        self._settled = _Facts()
        self._open: list[_Note] = []

    @property
    def unreplayable(self) -> str | None:
        """Why a replica with weights from disk must not join, or None."""
        return "weights were updated at run time" if self._facts().weights_changed else None

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests can ask for."""
        return tuple(self._facts().loras.values())

    @property
    def sleep_level(self) -> int:
        """How the engines' weights are put away, 0 while they are not."""
        rest = self._facts().rest
        return rest.sleep_level if "weights" in rest.asleep else 0

    def leaves_state(self, method: str, args: tuple[Any, ...]) -> bool:
        """Whether a joiner must be told of this call."""
        return method in _RECORDERS and (method != "collective_rpc" or args[0] in _WEIGHT_UPDATES)

    def record(self, method: str, args: tuple[Any, ...]) -> Callable[[bool], None]:
        """Note a call that is about to go to all replicas.

        Returns:
            A function to call once with whether any replica took it.
        """
        if not self.leaves_state(method, args):
            return lambda taken: None
        note = _Note(method, args)
        self._open.append(note)
        return partial(self._settle, note)

    def replay(self) -> list[Call]:
        """The calls that bring a fresh engine to this state, in order."""
        facts = self._facts()
        calls: list[Call] = [("add_lora", (lora,)) for lora in facts.loras.values()]
        calls += [("pin_lora", (lora_id,)) for lora_id in facts.pinned]
        if facts.weight_version is not None:
            calls.append(("set_weight_version", (facts.weight_version,)))
        return calls + facts.rest.replay()

    def undo(self) -> list[Call]:
        """The calls that let an engine of this state schedule and have its memory again; adapters may stay."""
        return self._facts().rest.undo()

    def snapshot(self, stage_id: int) -> StageState:
        """The whole state of a stage, for who follows from here on. Calls that are not settled count as taken."""
        calls = [(method, to_builtins(list(args))) for method, args in self.replay()]
        return StageState(stage_id, calls, self.unreplayable is not None)

    def adopt(self, snapshot: StageState) -> None:
        """Take a snapshot for this state. Whatever was recorded here is forgotten.

        Raises:
            WireError: it is none. Nothing has changed.
        """
        facts = _Facts(weights_changed=snapshot.unreplayable)
        for method, arguments in snapshot.replay:
            args = decode(method, arguments)
            if not self.leaves_state(method, args):
                raise WireError(f"{method} leaves no state")
            _RECORDERS[method](facts, args)
        self._settled = facts
        self._open.clear()
        self.refusals += 1

    def _facts(self) -> _Facts:
        facts = deepcopy(self._settled)
        for note in self._open:
            note.apply_to(facts)
        return facts

    def _settle(self, note: _Note, taken: bool) -> None:
        if note not in self._open:
            return
        note.taken = taken
        if not taken:
            self._open.remove(note)
            self.refusals += 1
        while self._open and self._open[0].taken:
            self._open.pop(0).apply_to(self._settled)


def _add_lora(facts: _Facts, args: tuple[Any, ...]) -> None:
    # Whoever has it need not load it again.
    facts.loras[args[0].lora_int_id] = replace(args[0], load_inplace=False)


def _remove_lora(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.loras.pop(args[0], None)
    facts.pinned.pop(args[0], None)


def _pin_lora(facts: _Facts, args: tuple[Any, ...]) -> None:
    # Engines keep an adapter that is forgotten, and can pin it; one that attaches later has none to pin.
    if args[0] in facts.loras:
        facts.pinned[args[0]] = None


def _set_weight_version(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.weight_version = args[0]


def _update_weights(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.weights_changed = True


_RECORDERS: dict[str, Callable[[_Facts, tuple[Any, ...]], None]] = {
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
    FORGET_LORA: _remove_lora,
    "pin_lora": _pin_lora,
    "pause_generation": lambda facts, args: facts.rest.pause_generation(*args),
    "pause_scheduler": lambda facts, args: facts.rest.pause(*args),
    "resume_scheduler": lambda facts, args: facts.rest.resume(),
    "sleep": lambda facts, args: facts.rest.sleep(*args),
    "wake_up": lambda facts, args: facts.rest.wake_up(*args),
    "release_kv_cache_memory": lambda facts, args: facts.rest.release_kv_cache(),
    "set_weight_version": _set_weight_version,
    "collective_rpc": _update_weights,
}
