"""The sampling parameters that a pipeline's file gives a stage: which there are, and whether vLLM takes them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm_omni_plugin.pipeline.places import PipelineError
from vllm_omni_plugin.pipeline.stage import Modality, Stage
from vllm_omni_plugin.vllm_api.stages.stage_params import StageParams

_OF_POOLING = frozenset({Modality.EMBEDDING, Modality.SCORES})
_SERVER_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_new_tokens",
}
"""Sampling parameters for which vLLM's server has defaults, and what `override_generation_config` calls them."""


def check_sampling(stage: Stage, *, by_client: bool) -> None:
    """Check the sampling parameters of a stage that vLLM runs.

    Args:
        by_client: whether a client's own parameters are for it: vLLM's server completes these, and has defaults of
            some only.

    Raises:
        PipelineError: its place is that in the stage.
    """
    if stage.output is not Modality.LATENT:
        # The model's configuration is read later; the check does not need it.
        runner = "pooling" if stage.output in _OF_POOLING else "generate"
        StageParams(stage, SimpleNamespace(runner_type=runner, pooler_config=SimpleNamespace(task="embed")))
    for name in stage.sampling:
        if by_client and stage.output not in _OF_POOLING and name not in _SERVER_DEFAULTS:
            known = ", ".join(_SERVER_DEFAULTS)
            message = f"clients have their own for this stage, and the server takes only {known} as defaults"
            raise PipelineError(message, ("sampling", name))


def set_server_defaults(model_config: Any, stage_model_config: Any, sampling: Mapping[str, Any]) -> None:
    """Make the sampling parameters of a stage the defaults of vLLM's server.

    Args:
        model_config: of the server, which knows the entry stage's model; it is changed, unless the user has overridden
            its generation configuration.
        stage_model_config: of the stage that clients' parameters are for; what comes with its model are defaults too.
        sampling: what the file says for that stage.
    """
    if any(value is not None for value in model_config.override_generation_config.values()):
        return
    defaults = dict(sampling)
    if stage_model_config is not model_config:
        # With a None for each of the others, or those of the entry stage's model would stay.
        of_model = dict.fromkeys(_SERVER_DEFAULTS) | stage_model_config.get_diff_sampling_param()
        # A default of `max_tokens` set here limits what requests ask for, which a model's own default does not.
        defaults = of_model | {"max_tokens": None} | defaults
    model_config.override_generation_config |= {_SERVER_DEFAULTS[name]: value for name, value in defaults.items()}
