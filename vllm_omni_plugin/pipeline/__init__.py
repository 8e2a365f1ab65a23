"""Pipelines: several stages with a pool of replicas each, and what follows from their graph.

Knows files and graphs only; may import the foundation. Start with `loading`, then `graph`.
"""

from vllm_omni_plugin.pipeline.drawing import mermaid, summary
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.loading import load_pipeline
from vllm_omni_plugin.pipeline.stage import VLLM_ENGINE, Modality, PipelineError, Stage
from vllm_omni_plugin.pipeline.transfer import StageInput, StageOutput, Transfer, Transform
from vllm_omni_plugin.pipeline.transforms import BuiltInTransform

__all__ = [
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
