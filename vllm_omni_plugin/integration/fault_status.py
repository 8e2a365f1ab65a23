"""The state of replicas in the shape of vLLM's fault-tolerance report."""

from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.orchestrator.engine_index import engine_index
from vllm_omni_plugin.orchestrator.stage_pool import StagePool


def fault_status(pools: Sequence[StagePool]) -> dict[str, Any]:
    """Every replica of these pools, healthy or dead."""
    engines = [
        {
            "id": engine_index(member.stage_id, member.replica_id),
            "status": "dead" if member.client is None else "healthy",
        }
        for pool in pools
        for member in pool.members
    ]
    return {"schema_version": 1, "total_engines": len(engines), "engines": engines}
