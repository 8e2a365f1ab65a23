"""vLLM's own engine core, scheduler and prefix cache with an executor that sleeps instead of running a model.

`PYTHONPATH=. vllm serve MODEL --distributed-executor-backend tests.fakes.sleeping_executor.SleepingExecutor
--num-gpu-blocks-override 3072 --additional-config '{"sleeping_executor": {"step_s": 0.02, "prefill_token_s": 0.0001,
"sequence_s": 0.0002}}'` in the folder of the project. An engine takes 0.42 GB.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni_plugin.sim import EngineSettings, SimRequest
from vllm_omni_plugin.sim.model.sequence import SimSequence
from vllm_omni_plugin.sim.model.sim_requests import to_request

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


class LoadedAdapters:
    """The LoRA adapters that have a slot: the most recently used ones, as in vLLM's `LRUCacheLoRAModelManager`.

    Args:
        slots: how many.
        load_s: what loading one takes, in seconds.
        log: file that gets a byte for each load; "" for none.
    """

    def __init__(self, slots: int = 0, load_s: float = 0.0, log: str = "") -> None:
        self._slots, self._load_s, self._log = slots, load_s, log
        self._loaded: dict[int, None] = {}

    def use(self, adapters: Collection[int]) -> float:
        """An iteration uses these adapters. Returns how many seconds it waits for them to be loaded."""
        missing = [adapter for adapter in adapters if adapter not in self._loaded]
        for adapter in adapters:
            self._loaded.pop(adapter, None)
            self._loaded[adapter] = None
        for adapter in list(self._loaded)[: -self._slots or None]:
            del self._loaded[adapter]
        if missing and self._log:
            with open(self._log, "ab") as log:
                log.write(b"." * len(missing))
        return len(missing) * self._load_s


class SleepingModel:
    """The linear model of `EngineSettings`, and the time that adapters take to be loaded."""

    def __init__(
        self, settings: EngineSettings, sleep: Callable[[float], None], adapters: LoadedAdapters | None = None
    ) -> None:
        self._adapters = adapters or LoadedAdapters()
        self.kv_blocks = settings.kv_blocks
        self._settings = settings
        self._sleep = sleep
        self._sequences: dict[str, SimSequence] = {}

    def compute(self, iteration: Iteration) -> Mapping[str, int]:
        """Sleep for the duration of the iteration; return the next token of each sequence without pending tokens."""
        self._update(iteration)
        if iteration.tokens:
            self._sleep(self._duration(iteration))
        return self._next_tokens(iteration)

    def compute_nothing(self) -> None:
        """Sleep for the duration of an empty iteration."""
        self._sleep(self._settings.duration(0, 0))

    def _update(self, iteration: Iteration) -> None:
        for request_id in iteration.ended:
            self._sequences.pop(request_id, None)
        for new in iteration.started:
            known = self._sequences.get(new.req_id)
            # A preempted request may come back as a new one, with its produced tokens in the prompt.
            if known is None or known.request.prompt != new.prompt_token_ids:
                self._sequences[new.req_id] = SimSequence(_request(new), self._settings, queued_at=0.0)

    def _duration(self, iteration: Iteration) -> float:
        prefill_tokens = decoding = 0
        for request_id, tokens in iteration.tokens.items():
            sequence = self._sequences[request_id]
            sequence.computed = iteration.computed[request_id]
            if sequence.decoding:
                decoding += 1
            else:
                prefill_tokens += tokens
        adapters = {self._sequences[request_id].request.lora_id for request_id in iteration.tokens}
        return self._settings.duration(prefill_tokens, decoding) + self._adapters.use(adapters - {0})

    def _next_tokens(self, iteration: Iteration) -> dict[str, int]:
        next_tokens: dict[str, int] = {}
        for request_id, tokens in iteration.tokens.items():
            sequence = self._sequences[request_id]
            sequence.computed += tokens
            if sequence.pending == 0:
                token = sequence.next_output().token
                assert token is not None
                next_tokens[request_id] = token
        return next_tokens


def _request(new: Any) -> SimRequest:
    """The request of a scheduler's `NewRequestData`."""
    fields = {"request_id": new.req_id, "lora_request": new.lora_request, "sampling_params": new.sampling_params}
    # A copy, since the scheduler appends to the prompt of a streaming-input session.
    prompt = list(new.prompt_token_ids)
    return to_request(SimpleNamespace(**fields, prompt_token_ids=prompt, resumable=False, cache_salt=None))


class SleepingExecutor(UniProcExecutor):  # type: ignore[misc]
    """Sleeps as long as a model would compute. Each token is a function of the tokens before it.

    It runs in the process of the engine core; nothing is loaded and no KV memory is taken. Capacities are vLLM's.
    Service times are those of `EngineSettings`: `--additional-config '{"sleeping_executor": {"step_s": 0.01,
    "prefill_token_s": 1e-4, "sequence_s": 1e-4}}'`. All engines give the same answers, which are also those of
    `vllm-omni-plugin sim`. `adapter_load_s` is what loading a LoRA adapter takes in addition, and `adapter_log` a file
    that gets a byte for each load. Log-probabilities, structured output and multimodal contents are ignored. In a
    lockstep group, a step of a rank without requests takes `step_s`.
    """

    def new_model(self, vllm_config: Any) -> Any:
        blocks = vllm_config.cache_config.num_gpu_blocks_override
        times = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0}
        times |= vllm_config.additional_config.get("sleeping_executor", {})
        slots = 0 if vllm_config.lora_config is None else vllm_config.lora_config.max_loras
        adapters = LoadedAdapters(slots, times.pop("adapter_load_s", 0.0), times.pop("adapter_log", ""))
        # vLLM's engine has the prefix cache; a second one would only hash the blocks again.
        settings = EngineSettings.of(vllm_config, blocks, prefix_caching=False, **times)
        return SleepingModel(settings, time.sleep, adapters)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """False: an iteration has been computed when `execute_model` returns."""
        return False

    def _init_executor(self) -> None:
        self.driver_worker = Worker(self.vllm_config, self.new_model(self.vllm_config))


class Worker:
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
