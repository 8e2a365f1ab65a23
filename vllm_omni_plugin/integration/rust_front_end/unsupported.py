"""What the Rust front end cannot answer for: embeddings and scores, audio, and answers of another tokenizer."""

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.pipeline import Modality

_INSTEAD = "unset VLLM_USE_RUST_FRONTEND, for the Python front end"


def refuse_unsupported_stages(stages: FleetStages) -> None:
    """Raise ConfigError if requests to these stages, or their answers, need the Python front end."""
    if stages.configs[stages.prompt_stage].model_config.runner_type == "pooling":
        raise ConfigError(
            "argument --runner: vLLM's Rust front end has no routes for embeddings, scores and other results of a "
            f"pooling model: {_INSTEAD}"
        )
    if stages.pipeline is None:
        return
    if others := [modality for modality in stages.pipeline.modalities if modality is not Modality.TEXT]:
        raise ConfigError(
            f"argument --omni-pipeline: vLLM's Rust front end answers in text, not in {others[0]}: {_INSTEAD}"
        )
    if stages.answer_tokenizer is not None:
        raise ConfigError(
            "argument --omni-pipeline: vLLM's Rust front end decodes answers with the tokenizer that reads prompts, "
            f"and the stage that answers has another one: {_INSTEAD}"
        )
