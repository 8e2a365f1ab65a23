"""The utility methods that only simulated engines answer."""

from collections.abc import Callable
from typing import Any

from vllm_omni_plugin.sim.model.engine_model import EngineModel
from vllm_omni_plugin.stages.utility_methods import UtilityMethods
from vllm_omni_plugin.vllm_api.protocol.sim_protocol import lora_id


class SimCalls(UtilityMethods):
    """Answers calls as far as they mean something to an engine without a model."""

    def __init__(self, model: EngineModel, abort: Callable[[list[str] | None, bool], None]) -> None:
        self._model = model
        self._loras: set[int] = set()
        own: dict[str, Callable[..., Any]] = {
            "add_lora": self._add_lora,
            "collective_rpc": lambda method, timeout=None, args=(), kwargs=None: [None],
            "compute_weight_checksums": lambda: [{"weights": str(model.settings.seed)}],
            "get_supported_tasks": lambda: ("generate",),
            "list_loras": lambda: self._loras,
            "pin_lora": self._pin_lora,
            "remove_lora": self._remove_lora,
        }
        super().__init__(abort, model.reset_prefix_cache, own, "a simulated engine")

    def call(self, method: str, args: list[Any]) -> Any:
        result = super().call(method, args)
        self._model.admitting = self.pause_mode is None
        self._model.scheduling = self.pause_mode != "keep"
        return result

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
