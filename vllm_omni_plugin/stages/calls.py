"""The utility methods of vLLM's engine core, as far as they mean something to a Python stage."""

from collections.abc import Callable
from typing import Any

from vllm_omni_plugin.orchestrator.rest_state import RestState

_FIRST_WEIGHTS = "default"


class StageCalls:
    """Answers calls and keeps what they leave behind.

    Args:
        abort: drops requests by their ids, None for all; with True, their clients are told.
    """

    def __init__(self, abort: Callable[[list[str] | None, bool], None]) -> None:
        self._abort = abort
        self._rest = RestState()
        self._weight_version = _FIRST_WEIGHTS
        self._methods: dict[str, Callable[..., Any]] = {
            "abort_requests": lambda ids: abort(ids, False),
            "get_supported_tasks": lambda: (),
            "get_weight_version": lambda: self._weight_version,
            "is_scheduler_paused": lambda: self.paused,
            "is_sleeping": lambda: self.paused or bool(self._rest.asleep),
            "pause_scheduler": self._pause,
            "profile": lambda *args: None,
            "release_kv_cache_memory": self._rest.release_kv_cache,
            "reset_encoder_cache": lambda: None,
            "reset_mm_cache": lambda: None,
            "reset_prefix_cache": lambda running=False, connector=False: True,
            "resume_scheduler": self._rest.resume,
            "set_weight_version": self._set_weight_version,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    @property
    def paused(self) -> bool:
        """Whether nothing new may be computed."""
        return self._rest.pause_mode is not None

    @property
    def awaits_idleness(self) -> bool:
        """Whether the pause that was just called is complete only when what runs has ended."""
        return self._rest.pause_mode == "wait"

    def call(self, method: str, args: list[Any]) -> Any:
        """Run a method and return its result.

        Raises:
            Exception: the method is unknown, or does not take these arguments.
        """
        if method not in self._methods:
            raise AttributeError(f"a Python stage has no method {method!r}")
        return self._methods[method](*args)

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._rest.pause(mode)
        self._rested(mode)

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._rest.sleep(level, mode)
        self._rested(mode)

    def _rested(self, mode: str) -> None:
        if mode == "abort":
            self._abort(None, True)

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        self._rest.wake_up(tags)
        return not self._rest.asleep

    def _set_weight_version(self, version: str) -> None:
        self._weight_version = version
