"""What the engines of a stage have been told and a replica that attaches later must be told too."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, tuple[Any, ...]]
"""A utility method of the engine core and its arguments."""

_WEIGHT_UPDATES = frozenset({"start_weight_update", "update_weights", "finish_weight_update", "reload_weights"})
_RESUME: Call = ("resume_scheduler", ())


@dataclass
class _Facts:
    """The state itself, apart from how it is recorded."""

    loras: dict[int, Any] = field(default_factory=dict)
    pinned: dict[int, None] = field(default_factory=dict)
    scheduling: list[Call] = field(default_factory=list)
    weight_version: str | None = None
    weights_changed: bool = False


class SharedState:
    """The engine state that past calls have left, as the shortest list of calls that makes it again.

    `version` changes with every recorded call: a joiner that finds it unchanged after its replay is up to date.
    """

    def __init__(self) -> None:
        self.version = 0
        self._facts = _Facts()

    @property
    def unreplayable(self) -> str | None:
        """Why a replica with weights from disk must not join, or None."""
        return "weights were updated at run time" if self._facts.weights_changed else None

    def record(self, method: str, args: tuple[Any, ...]) -> Callable[[], None]:
        """Note a call that is about to go to all replicas.

        Returns:
            A function that takes the note back, for a call that all replicas refused.
        """
        recorder = _RECORDERS.get(method)
        if recorder is None:
            return lambda: None
        before = deepcopy(self._facts)
        recorder(self._facts, args)
        self.version += 1
        return lambda: self._restore(before)

    def replay(self) -> list[Call]:
        """The calls that bring a fresh engine to this state, in order."""
        facts = self._facts
        calls: list[Call] = [("add_lora", (lora,)) for lora in facts.loras.values()]
        calls += [("pin_lora", (lora_id,)) for lora_id in facts.pinned]
        if facts.weight_version is not None:
            calls.append(("set_weight_version", (facts.weight_version,)))
        return calls + facts.scheduling

    def _restore(self, before: _Facts) -> None:
        self._facts = before
        self.version += 1


def _add_lora(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.loras[args[0].lora_int_id] = args[0]


def _remove_lora(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.loras.pop(args[0], None)
    facts.pinned.pop(args[0], None)


def _pin_lora(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.pinned[args[0]] = None


def _pause(facts: _Facts, args: tuple[Any, ...]) -> None:
    if facts.scheduling and facts.scheduling[-1][0] == "pause_scheduler":
        facts.scheduling.pop()
    facts.scheduling.append(("pause_scheduler", args))


def _resume(facts: _Facts, args: tuple[Any, ...]) -> None:
    if not any(method == "sleep" for method, _ in facts.scheduling):
        facts.scheduling = []
        return
    if facts.scheduling[-1][0] == "pause_scheduler":
        facts.scheduling.pop()
    if facts.scheduling[-1] != _RESUME:
        facts.scheduling.append(_RESUME)


def _sleep(facts: _Facts, args: tuple[Any, ...]) -> None:
    # Sleeping pauses as well, so whatever came before it no longer matters.
    facts.scheduling = [("sleep", args)]


def _release_kv_cache_memory(facts: _Facts, args: tuple[Any, ...]) -> None:
    call: Call = ("release_kv_cache_memory", args)
    if call not in facts.scheduling:
        facts.scheduling.append(call)


def _wake_up(facts: _Facts, args: tuple[Any, ...]) -> None:
    tags = args[0] if args else None
    if tags is None:
        facts.scheduling = []
    elif facts.scheduling and ("wake_up", args) not in facts.scheduling:
        facts.scheduling.append(("wake_up", args))


def _set_weight_version(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.weight_version = args[0]


def _collective_rpc(facts: _Facts, args: tuple[Any, ...]) -> None:
    facts.weights_changed |= args[0] in _WEIGHT_UPDATES


_RECORDERS: dict[str, Callable[[_Facts, tuple[Any, ...]], None]] = {
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
    "pin_lora": _pin_lora,
    "pause_scheduler": _pause,
    "resume_scheduler": _resume,
    "sleep": _sleep,
    "wake_up": _wake_up,
    "release_kv_cache_memory": _release_kv_cache_memory,
    "set_weight_version": _set_weight_version,
    "collective_rpc": _collective_rpc,
}
