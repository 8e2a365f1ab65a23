"""Every symbol of vLLM that this package uses, as plain data: the one list to read when a new version of vLLM appears.

Importing this module imports nothing of vLLM. The contract tests resolve each symbol in the installed version.
"""

from vllm_omni_plugin.vllm_api.symbols.engine_symbols import (
    BALANCING,
    CACHE_EVENTS,
    CALLS,
    FINGERPRINT,
    LAUNCH,
    MOVING,
    PROTOCOL,
)
from vllm_omni_plugin.vllm_api.symbols.front_symbols import (
    ANSWERS,
    COMMAND,
    ENGINE_CLIENT,
    FLAGS,
    LABELS,
    SERVER,
    SEVERAL_SERVERS,
    TRACING,
)
from vllm_omni_plugin.vllm_api.symbols.group_symbols import GROUPS
from vllm_omni_plugin.vllm_api.symbols.pipeline_symbols import PIPELINES
from vllm_omni_plugin.vllm_api.symbols.simulation_symbols import EXECUTOR, SIMULATION
from vllm_omni_plugin.vllm_api.symbols.stage_symbols import STAGES
from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

__all__ = ["CALLS", "SYMBOLS", "Symbol"]

SYMBOLS = (
    *FLAGS,
    *COMMAND,
    *SEVERAL_SERVERS,
    *ENGINE_CLIENT,
    *SERVER,
    *ANSWERS,
    *TRACING,
    *PROTOCOL,
    *LAUNCH,
    *GROUPS,
    *CACHE_EVENTS,
    *CALLS,
    *BALANCING,
    *SIMULATION,
    *EXECUTOR,
    *MOVING,
    *FINGERPRINT,
    *LABELS,
    *STAGES,
    *PIPELINES,
)
"""All of them."""
