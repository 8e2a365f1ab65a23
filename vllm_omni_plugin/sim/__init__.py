"""Simulated engines: a model of time and cache behind vLLM's engine-core protocol."""

from vllm_omni_plugin.sim.model import EngineModel, LoadReport, Step
from vllm_omni_plugin.sim.requests import Prefill, SimOutput, SimRequest
from vllm_omni_plugin.sim.settings import EngineSettings

__all__ = ["EngineModel", "EngineSettings", "LoadReport", "Prefill", "SimOutput", "SimRequest", "Step"]
