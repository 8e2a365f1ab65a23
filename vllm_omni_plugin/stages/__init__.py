"""Python stages: the base class for users, their processes, and their requests."""

from vllm_omni_plugin.stages.python_stage import PythonStage, StageJob

__all__ = ["PythonStage", "StageJob"]
