"""Stages of a pipeline that are Python classes: what a user writes, its process, and how heads speak to it."""

from vllm_omni_plugin.stages.python_stage import PythonStage, StageJob

__all__ = ["PythonStage", "StageJob"]
