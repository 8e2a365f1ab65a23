"""`--distributed-executor-backend vllm_omni_plugin.sim.executor.SleepingExecutor`: vLLM's engine without a model.

Imports vLLM, so unlike the rest of this package it is not re-exported.
"""

import time
from typing import Any

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.sleeping import SleepingModel, read_service_times
from vllm_omni_plugin.vllm_api.launch.function_executor import ModelFreeExecutor


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
        blocks, times = (
            vllm_config.cache_config.num_gpu_blocks_override,
            read_service_times(vllm_config.additional_config),
        )
        # The cache is vLLM's; what decides here would only hash the blocks a second time.
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
            raise ConfigError(f"the sleeping executor cannot stand in for a model with {what}")
