"""An executor without workers: vLLM's engine core, scheduler and prefix cache with a function in place of the model."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

_LAYER = "layer"
_LAYOUT = "LBNHC"


@dataclass(frozen=True, slots=True)
class Iteration:
    """A batch of vLLM's scheduler.

    Attributes:
        started: vLLM's `NewRequestData` of requests that start, or start again.
        tokens: number of tokens to compute, by request id.
        computed: number of tokens that were computed before or came from the cache, by request id.
        ended: ids of requests that have finished.
    """

    started: Sequence[Any]
    tokens: Mapping[str, int]
    computed: Mapping[str, int]
    ended: Collection[str]


class ModelFreeExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs in the process of the engine core. Nothing is loaded and no KV memory is taken."""

    @abstractmethod
    def new_model(self, vllm_config: Any) -> Any:
        """The model, like `sim.executor.SleepingModel`. Raises ConfigError for a configuration it cannot serve."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """False: an iteration has been computed when `execute_model` returns."""
        return False

    def _init_executor(self) -> None:
        self.driver_worker = _Worker(self.vllm_config, self.new_model(self.vllm_config))


class _Worker:
    """The executor calls these methods by name; a call of any other worker method is an error."""

    def __init__(self, vllm_config: Any, model: Any) -> None:
        self._cache_config = vllm_config.cache_config
        self._model = model
        self._loras: set[int] = set()

    def execute_model(self, scheduled: Any) -> Any:
        cached = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tokens = scheduled.num_scheduled_tokens
        next_tokens = self._model.compute(
            Iteration(scheduled.scheduled_new_reqs, tokens, computed, scheduled.finished_req_ids)
        )
        return ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={request_id: index for index, request_id in enumerate(tokens)},
            sampled_token_ids=[[next_tokens[request_id]] if request_id in next_tokens else [] for request_id in tokens],
        )

    def execute_dummy_batch(self) -> None:
        self._model.compute_nothing()

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {_LAYER: self._layer}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [_LAYOUT]

    def set_kv_cache_layout(self, layout: str, interleave_size: int = 1) -> None:
        record_kv_cache_layout(self._cache_config, layout)

    def determine_available_memory(self) -> int:
        return int(self._model.kv_blocks * self._layer.page_size_bytes)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def add_lora(self, lora_request: Any) -> bool:
        self._loras.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        known = lora_id in self._loras
        self._loras.discard(lora_id)
        return known

    def pin_lora(self, lora_id: int) -> bool:
        return lora_id in self._loras

    def list_loras(self) -> set[int]:
        return set(self._loras)

    def compile_or_warm_up_model(self) -> Any:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def initialize_from_config(self, kv_cache_configs: Sequence[Any]) -> None:
        """Does nothing, as the methods below: there is no device, memory or process."""

    def synchronize_device(self) -> None: ...

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: Sequence[str] | None) -> None: ...

    def profile(self, is_start: bool, profile_prefix: str | None) -> None: ...

    def shutdown(self) -> None: ...

    @property
    def _layer(self) -> Any:
        # One layer of full attention of the smallest size: blocks are counted, never used.
        return FullAttentionSpec(
            block_size=self._cache_config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
