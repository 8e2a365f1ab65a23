"""The utility methods of vLLM's engine core, as far as they mean something to an engine without a model."""

from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni_plugin.orchestrator.rest_state import RestState
from vllm_omni_plugin.sim.model import EngineModel
from vllm_omni_plugin.vllm_api.sim_protocol import lora_id

_FIRST_WEIGHTS = "default"


class EngineCalls:
    """Answers calls and keeps what they leave behind.

    Args:
        model: the engine; pausing takes effect on it.
        abort: drops requests by their ids; with True, their clients are told.
    """

    def __init__(self, model: EngineModel, abort: Callable[[Iterable[str], bool], None]) -> None:
        self._model = model
        self._abort = abort
        self._rest = RestState()
        self._loras: set[int] = set()
        self._weight_version = _FIRST_WEIGHTS
        self._methods: dict[str, Callable[..., Any]] = {
            "abort_requests": lambda ids: abort(model.request_ids if ids is None else ids, False),
            "add_lora": self._add_lora,
            "collective_rpc": lambda method, timeout=None, args=(), kwargs=None: [None],
            "compute_weight_checksums": lambda: [{"weights": str(model.settings.seed)}],
            "get_supported_tasks": lambda: ("generate",),
            "get_weight_version": lambda: self._weight_version,
            "is_scheduler_paused": lambda: self._rest.pause_mode is not None,
            "is_sleeping": lambda: self._rest.pause_mode is not None or bool(self._rest.asleep),
            "list_loras": lambda: self._loras,
            "pause_scheduler": self._pause,
            "pin_lora": self._pin_lora,
            "profile": lambda *args: None,
            "release_kv_cache_memory": self._release_kv_cache_memory,
            "remove_lora": self._remove_lora,
            "reset_encoder_cache": lambda: None,
            "reset_mm_cache": lambda: None,
            "reset_prefix_cache": lambda running=False, connector=False: model.reset_prefix_cache(),
            "resume_scheduler": self._rest.resume,
            "set_weight_version": self._set_weight_version,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    def call(self, method: str, args: list[Any]) -> Any:
        """Run a method and return its result.

        Raises:
            Exception: the method is unknown, does not take these arguments, or refuses them.
        """
        if method not in self._methods:
            raise AttributeError(f"a simulated engine has no method {method!r}")
        result = self._methods[method](*args)
        self._model.admitting = self._rest.pause_mode is None
        self._model.scheduling = self._rest.pause_mode != "keep"
        return result

    @property
    def waits_for_requests(self) -> bool:
        """Whether the pause that was just called is complete only when what runs has ended."""
        return self._rest.pause_mode == "wait"

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._rest.pause(mode)
        self._rested(mode, clear_cache)

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._rest.sleep(level, mode)
        self._rested(mode, clear_cache=level >= 1)

    def _rested(self, mode: str, clear_cache: bool) -> None:
        if mode == "abort":
            self._abort(self._model.request_ids, True)
        if clear_cache:
            self._model.reset_prefix_cache()

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        self._rest.wake_up(tags)
        return not self._rest.asleep

    def _release_kv_cache_memory(self) -> None:
        if self._rest.pause_mode is None:
            raise RuntimeError("it must be paused first")
        self._rest.release_kv_cache()

    def _set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def _add_lora(self, fields: Any) -> bool:
        self._loras.add(lora_id(fields))
        return True

    def _remove_lora(self, adapter: int) -> bool:
        known = adapter in self._loras
        self._loras.discard(adapter)
        return known

    def _pin_lora(self, adapter: int) -> bool:
        if adapter not in self._loras:
            raise ValueError(f"adapter {adapter} is not loaded")
        return True
