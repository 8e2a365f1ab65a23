"""`--distributed-executor-backend vllm_omni_plugin.sim.executor.SleepingExecutor`: vLLM's engine without a model.

Imports vLLM, so unlike the rest of this package it is not re-exported.
"""

import time
from typing import Any

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.sleeping import SleepingModel, read_service_times
from vllm_omni_plugin.vllm_api.launch.function_executor import ModelFreeExecutor

_DEFAULT_CONCURRENCY = 32
"""Requests of the maximum length that the KV memory holds, unless the user says otherwise."""


class SleepingExecutor(ModelFreeExecutor):
    """Sleeps as long as a model would compute, and answers with tokens that are a function of those before.

    Capacities are vLLM's (`--num-gpu-blocks-override`, `--block-size`, `--max-num-seqs`, ...), service times those of
    `EngineSettings`, given as `--additional-config '{"sleeping_executor": {"step_s": 0.01, "prefill_token_s": 1e-4,
    "sequence_s": 1e-4}}'`. Answers are those of `vllm-omni-plugin sim`, the same from every engine of a seed.
    Log-probabilities, structured output and multimodal contents are ignored. Ranks of a lockstep group keep step as
    vLLM's engine cores make them; a step without requests of its own takes a rank `step_s`.

    Raises:
        ConfigError: service times that make no sense, or a model that does not generate one token at a time.
    """

    def new_model(self, vllm_config: Any) -> SleepingModel:
        _refuse_what_is_not_simulated(vllm_config)
        return SleepingModel(_settings_of(vllm_config), time.sleep)


def _refuse_what_is_not_simulated(vllm_config: Any) -> None:
    model = vllm_config.model_config
    for given, what in (
        (model.runner_type != "generate", f"--runner {model.runner_type}"),
        (vllm_config.speculative_config is not None, "--speculative-config"),
        (model.enable_prompt_embeds, "--enable-prompt-embeds"),
        (vllm_config.parallel_config.world_size > 1, "tensor or pipeline parallelism"),
    ):
        if given:
            raise ConfigError(f"the sleeping executor cannot stand in for a model with {what}")


def _settings_of(vllm_config: Any) -> EngineSettings:
    model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    return EngineSettings(
        **read_service_times(vllm_config.additional_config),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_blocks=cache.num_gpu_blocks_override or _DEFAULT_CONCURRENCY * -(-model.max_model_len // cache.block_size),
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        vocabulary_size=model.get_vocab_size(),
        # The cache is vLLM's; what decides here would only hash the blocks a second time.
        prefix_caching=False,
        seed=model.seed,
    )
