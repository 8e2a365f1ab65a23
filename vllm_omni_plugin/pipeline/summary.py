"""A pipeline as rows of a table."""

from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Stage

_COLUMNS = ("ID", "NAME", "ENGINE", "INPUTS", "TRANSFORM", "REPLICAS", "POLICY", "OUTPUT")


def summary(pipeline: Pipeline) -> list[tuple[str, ...]]:
    """Return the names of the columns and a row for each stage, in topological order."""
    return [_COLUMNS, *(_row(pipeline, stage) for stage in pipeline.order)]


def _row(pipeline: Pipeline, stage: Stage) -> tuple[str, ...]:
    return (
        str(stage.id),
        stage.name,
        f"vLLM: {stage.model}" if stage.is_vllm else stage.engine,
        _inputs(stage),
        pipeline.transform_of(stage) or "-",
        str(stage.replicas) if stage.replicas else "headless",
        stage.policy,
        f"{stage.output} (final)" if stage.final else stage.output,
    )


def _inputs(stage: Stage) -> str:
    if stage.async_chunk:
        return f"{', '.join(stage.inputs)} (chunks of {stage.chunk_size})"
    if stage.min_prompt_tokens:
        return f"request (from {stage.min_prompt_tokens} tokens)"
    return ", ".join(stage.inputs) or "request"
