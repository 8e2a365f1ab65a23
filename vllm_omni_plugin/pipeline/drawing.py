"""A pipeline as a Mermaid flow chart and as a table."""

import re

from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Stage

_COLUMNS = ("ID", "NAME", "ENGINE", "INPUTS", "TRANSFORM", "REPLICAS", "POLICY", "OUTPUT")
_SPECIAL = re.compile(r"[^A-Za-z0-9_ ./:-]")
"""Characters that may have a meaning in Mermaid's quoted text."""


def mermaid(pipeline: Pipeline) -> str:
    """Return a Mermaid flow chart, always the same: round are the request and final outputs, dotted the chunks."""
    lines = ["flowchart LR", '  request(["request"])']
    lines += [f'  s{stage.id}["{_label(stage)}"]' for stage in pipeline.stages]
    lines += [f'  o{stage.id}(["{stage.output}"])' for stage in pipeline.stages if stage.final]
    for stage in pipeline.stages:
        lines += _edges(pipeline, stage)
    lines += [f"  s{stage.id} ==> o{stage.id}" for stage in pipeline.stages if stage.final]
    return "".join(f"{line}\n" for line in lines)


def summary(pipeline: Pipeline) -> list[tuple[str, ...]]:
    """Return the names of the columns and a row for each stage, in topological order."""
    return [_COLUMNS, *(_row(pipeline, stage) for stage in pipeline.order)]


def _row(pipeline: Pipeline, stage: Stage) -> tuple[str, ...]:
    return (
        str(stage.id),
        stage.name,
        _engine(stage),
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


def _engine(stage: Stage) -> str:
    return f"vLLM: {stage.model}" if stage.is_vllm else stage.engine


def _label(stage: Stage) -> str:
    count = f"{stage.replicas} replica{'s' * (stage.replicas != 1)}" if stage.replicas else "headless replicas"
    return "<br/>".join(map(_escaped, (stage.name, _engine(stage), count)))


def _edges(pipeline: Pipeline, stage: Stage) -> list[str]:
    transform = _escaped(pipeline.transform_of(stage) or "")
    whole = f'-- "{transform}" -->' if transform else "-->"
    arrow = f'-. "{transform} in chunks" .->' if stage.async_chunk else whole
    sources = [f"s{upstream.id}" for upstream in pipeline.upstream(stage)] or ["request"]
    return [f"  {source} {arrow} s{stage.id}" for source in sources]


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"#{ord(match[0])};", text)
