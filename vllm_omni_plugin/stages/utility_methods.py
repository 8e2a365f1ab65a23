"""The utility methods of vLLM's engine core, as far as they mean something to an engine that is not vLLM's."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_plugin.vllm_api.requests.rest_state import RestState

_FIRST_WEIGHTS = "default"


class UtilityMethods:
    """Answers calls and keeps what they leave behind.

    Args:
        abort: drops requests by their ids, None for all; with True, their clients get an aborted output.
        clear_cache: clears the prefix cache; returns whether it could.
        own: further methods of the engine, by name.
        kind: what it is, for errors.
    """

    def __init__(
        self,
        abort: Callable[[list[str] | None, bool], None],
        clear_cache: Callable[[], bool],
        own: Mapping[str, Callable[..., Any]],
        kind: str,
    ) -> None:
        self._abort = abort
        self._clear_cache = clear_cache
        self._kind = kind
        self._rest = RestState()
        self._weight_version = _FIRST_WEIGHTS
        self._methods: dict[str, Callable[..., Any]] = {
            "abort_requests": lambda ids: abort(ids, False),
            "get_weight_version": lambda: self._weight_version,
            "is_scheduler_paused": lambda: self.pause_mode is not None,
            "is_sleeping": lambda: self.pause_mode is not None or bool(self._rest.asleep),
            "pause_generation": self._pause_generation,
            "pause_scheduler": self._pause,
            "profile": lambda *args: None,
            "release_kv_cache_memory": self._release_kv_cache_memory,
            "reset_encoder_cache": lambda: None,
            "reset_mm_cache": lambda: None,
            "reset_prefix_cache": lambda running=False, connector=False: clear_cache(),
            "resume_scheduler": self._rest.resume,
            "set_weight_version": self._set_weight_version,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            **own,
        }

    @property
    def pause_mode(self) -> str | None:
        """How it is paused, see `RestState`; with `wait`, the pause is complete only when what runs has ended."""
        return self._rest.pause_mode

    def call(self, method: str, args: list[Any]) -> Any:
        """Run a method and return its result.

        Raises:
            Exception: the method is unknown, does not take these arguments, or refuses them.
        """
        if method not in self._methods:
            raise AttributeError(f"{self._kind} has no method {method!r}")
        return self._methods[method](*args)

    def _pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._rest.pause_generation(mode)
        self._rested(mode, clear_cache)

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._rest.pause(mode)
        self._rested(mode, clear_cache)

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._rest.sleep(level, mode)
        self._rested(mode, clear_cache=level >= 1)

    def _rested(self, mode: str, clear_cache: bool) -> None:
        if mode == "abort":
            self._abort(None, True)
        if clear_cache:
            self._clear_cache()

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        self._rest.wake_up(tags)
        return not self._rest.asleep

    def _release_kv_cache_memory(self) -> None:
        if self.pause_mode is None:
            raise RuntimeError("it must be paused first")
        self._rest.release_kv_cache()

    def _set_weight_version(self, version: str) -> None:
        self._weight_version = version
