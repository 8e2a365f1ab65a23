"""Settings of the simulated engines."""

import json
from dataclasses import replace
from pathlib import Path

from vllm_omni_plugin.sim import EngineSettings

CALIBRATION = Path(__file__).resolve().parents[1] / "calibration" / "cpu.json"
"""Fitted to a real engine by benchmarks/calibrate.py."""

_KV_TOKENS = 65_536
_MAX_MODEL_LEN = 32_768


def accelerator() -> EngineSettings:
    """An assumed 8B model on one accelerator: the defaults of `EngineSettings`, with longer prompts."""
    return EngineSettings(max_model_len=_MAX_MODEL_LEN)


def calibrated(path: Path) -> EngineSettings:
    """Service times and block size of a real engine, with as much KV memory as `accelerator`."""
    fitted = json.loads(path.read_text())["settings"]
    settings = EngineSettings(**fitted)
    return replace(settings, kv_blocks=_KV_TOKENS // settings.block_size, max_model_len=_MAX_MODEL_LEN)


def profile(name: str) -> EngineSettings:
    """The profile `accelerator` or `cpu`, or a file written by benchmarks/calibrate.py."""
    if name == "accelerator":
        return accelerator()
    return calibrated(CALIBRATION if name == "cpu" else Path(name))
