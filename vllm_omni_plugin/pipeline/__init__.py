"""Pipelines: the stage graph of a YAML file, its checks and its drawing, and transforms between stages.

Imports neither vLLM nor torch. Start with `loading`, then `graph`.
"""

from vllm_omni_plugin.pipeline.drawing import mermaid, summary
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.loading import load_pipeline
from vllm_omni_plugin.pipeline.stage import ANSWERS, VLLM_ENGINE, Modality, PipelineError, Stage
from vllm_omni_plugin.pipeline.transfer import StageInput, StageOutput, Transfer, Transform
from vllm_omni_plugin.pipeline.transforms import BuiltInTransform

__all__ = [
    "ANSWERS",
    "VLLM_ENGINE",
    "BuiltInTransform",
    "Modality",
    "Pipeline",
    "PipelineError",
    "Stage",
    "StageInput",
    "StageOutput",
    "Transfer",
    "Transform",
    "load_pipeline",
    "mermaid",
    "summary",
]
