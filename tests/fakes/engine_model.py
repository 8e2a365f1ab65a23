"""The state that operator calls leave in an engine."""

from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter


class RefusedError(Exception):
    """The engine would fail the call."""


@dataclass
class EngineModel:
    """The state in vLLM's engine core and its executor."""

    loras: dict[int, Adapter] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    weight_version: str | None = None
    pause: str | None = None
    refuses: bool = False
    asleep: set[str] = field(default_factory=set)

    def apply(self, method: str, args: tuple[Any, ...]) -> None:
        """Raises `RefusedError` if the engine would fail the call."""
        getattr(self, method)(*args)

    def add_lora(self, adapter: Adapter) -> None:
        self.loras[adapter.lora_int_id] = adapter

    def remove_lora(self, lora_id: int) -> None:
        self.loras.pop(lora_id, None)
        self.pinned.discard(lora_id)

    def pin_lora(self, lora_id: int) -> None:
        if lora_id not in self.loras:
            raise RefusedError
        self.pinned.add(lora_id)

    def set_weight_version(self, version: str) -> None:
        self.weight_version = version

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.pause_scheduler(mode)
        self.refuses = mode != "keep"

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.pause = "all" if mode == "keep" else "new"

    def resume_scheduler(self) -> None:
        self.pause = None
        self.refuses = False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.pause_scheduler(mode)
        # vLLM's executor ignores memory that sleeps already.
        if level >= 1 and "weights" not in self.asleep:
            self.asleep = {"weights", "kv_cache"}

    def release_kv_cache_memory(self) -> None:
        if self.pause is None or self.asleep:
            raise RefusedError
        self.asleep = {"kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        memory = None if tags is None else set(tags) - {"scheduling"}
        if memory is None:
            self.asleep = set()
        elif memory <= self.asleep:
            self.asleep = self.asleep - memory
        if not self.asleep:
            self.resume_scheduler()

    def profile(self) -> None:
        """Leaves no state."""
