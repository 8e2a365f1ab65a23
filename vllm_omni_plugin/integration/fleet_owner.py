"""The fleet as AsyncLLM's side sees it."""

from typing import Protocol

from vllm_omni_plugin.integration.fleet_stages import FleetStages
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator


class FleetOwner(Protocol):
    """What the client lets finish and closes; `integration.fleet.Fleet` in service."""

    orchestrator: Orchestrator
    stages: FleetStages

    def let_finish(self, timeout: float) -> float: ...

    def close(self, timeout: float | None = None) -> None: ...
