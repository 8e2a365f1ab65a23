"""`--distributed-executor-backend vllm_omni_plugin.sim.executor.SleepingExecutor`: vLLM's engine without a model.

Not re-exported by `sim`, because it imports vLLM.
"""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.model.sequence import SimSequence
from vllm_omni_plugin.sim.model.sim_requests import from_scheduler
from vllm_omni_plugin.vllm_api.launch.model_free_executor import Iteration, ModelFreeExecutor

_KEY = "sleeping_executor"
_Seconds = Annotated[float, Meta(ge=0, le=60)]


class _ServiceTimes(Struct, forbid_unknown_fields=True):
    """The fields of `EngineSettings` that `--additional-config` may set."""

    step_s: _Seconds = 0.0
    prefill_token_s: _Seconds = 0.0
    sequence_s: _Seconds = 0.0


def _read_service_times(additional_config: Any) -> dict[str, float]:
    given = additional_config.get(_KEY, {}) if isinstance(additional_config, dict) else {}
    try:
        convert(given, _ServiceTimes)
    except ValidationError as error:
        known = ", ".join(_ServiceTimes.__struct_fields__)
        raise ConfigError(f"--additional-config: {_KEY}: {error}; use {known}: seconds from 0 to 60") from None
    return dict(given)


class SleepingModel:
    """The model of `SleepingExecutor`: the linear model of `EngineSettings`."""

    def __init__(self, settings: EngineSettings, sleep: Callable[[float], None]) -> None:
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
                self._sequences[new.req_id] = SimSequence(from_scheduler(new), self._settings, queued_at=0.0)

    def _duration(self, iteration: Iteration) -> float:
        prefill_tokens = decoding = 0
        for request_id, tokens in iteration.tokens.items():
            sequence = self._sequences[request_id]
            sequence.computed = iteration.computed[request_id]
            if sequence.decoding:
                decoding += 1
            else:
                prefill_tokens += tokens
        return self._settings.duration(prefill_tokens, decoding)

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


class SleepingExecutor(ModelFreeExecutor):
    """Sleeps as long as a model would compute. Each token is a function of the tokens before it.

    Capacities are vLLM's (`--num-gpu-blocks-override`, `--block-size`, `--max-num-seqs`, ...). Service times are those
    of `EngineSettings`: `--additional-config '{"sleeping_executor": {"step_s": 0.01, "prefill_token_s": 1e-4,
    "sequence_s": 1e-4}}'`. All engines give the same answers, which are also those of `vllm-omni-plugin
    sim`. Log-probabilities, structured output and multimodal contents are ignored. In a lockstep
    group, a step of a rank without requests takes `step_s`.

    Raises:
        ConfigError: invalid service times, or a model that does not generate one token at a time.
    """

    def new_model(self, vllm_config: Any) -> SleepingModel:
        _refuse_what_is_not_simulated(vllm_config)
        blocks = vllm_config.cache_config.num_gpu_blocks_override
        times = _read_service_times(vllm_config.additional_config)
        # vLLM's engine has the prefix cache; a second one would only hash the blocks again.
        return SleepingModel(EngineSettings.of(vllm_config, blocks, prefix_caching=False, **times), time.sleep)


def _refuse_what_is_not_simulated(vllm_config: Any) -> None:
    model = vllm_config.model_config
    for given, what in (
        (model.runner_type != "generate", f"--runner {model.runner_type}"),
        (vllm_config.speculative_config is not None, "--speculative-config"),
        (model.enable_prompt_embeds, "--enable-prompt-embeds"),
        (vllm_config.parallel_config.world_size > 1, "tensor or pipeline parallelism"),
    ):
        if given:
            raise ConfigError(f"the sleeping executor does not support a model with {what}")
