"""Simulated engines: a model of time and cache behind vLLM's engine-core protocol."""

from vllm_omni_plugin.sim.model.engine_model import EngineModel, IterationReport, Step
from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.model.sim_requests import Prefill, SimOutput, SimRequest

__all__ = ["EngineModel", "EngineSettings", "IterationReport", "Prefill", "SimOutput", "SimRequest", "Step"]
