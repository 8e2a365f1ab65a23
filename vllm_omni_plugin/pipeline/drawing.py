"""A pipeline as a picture."""

import re

from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Stage

_SPECIAL = re.compile(r"[^A-Za-z0-9_ ./:-]")
"""All but what means nothing in a quoted text of Mermaid's."""


def mermaid(pipeline: Pipeline) -> str:
    """Return a Mermaid flow chart: the same text for the same pipeline.

    Boxes are stages; arrows carry the transform, and are dotted where chunks travel; rounded ends are the request and
    the final outputs.
    """
    lines = ["flowchart LR", '  request(["request"])']
    lines += [f'  s{stage.id}["{_label(stage)}"]' for stage in pipeline.stages]
    lines += [f'  o{stage.id}(["{stage.output}"])' for stage in pipeline.stages if stage.final]
    for stage in pipeline.stages:
        lines += _edges(pipeline, stage)
    lines += [f"  s{stage.id} ==> o{stage.id}" for stage in pipeline.stages if stage.final]
    return "".join(f"{line}\n" for line in lines)


def _label(stage: Stage) -> str:
    engine = f"vLLM: {stage.model}" if stage.is_vllm else stage.engine
    count = f"{stage.replicas} replica{'s' * (stage.replicas != 1)}" if stage.replicas else "headless replicas"
    return "<br/>".join(map(_escaped, (stage.name, engine, count)))


def _edges(pipeline: Pipeline, stage: Stage) -> list[str]:
    transform = _escaped(pipeline.transform_of(stage) or "")
    whole = f'-- "{transform}" -->' if transform else "-->"
    arrow = f'-. "{transform} in chunks" .->' if stage.async_chunk else whole
    sources = [f"s{upstream.id}" for upstream in pipeline.upstream(stage)] or ["request"]
    return [f"  {source} {arrow} s{stage.id}" for source in sources]


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"#{ord(match[0])};", text)
