"""A fleet for `FleetClient` that starts nothing."""

from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks


class IdleFleet:
    """A fleet of one stage. `closed_after` has the timeouts of its `close` calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.fleet_calls = FleetCalls(orchestrator)
        self.stages = FleetStages(None, [None])
        self.worker_ranks = WorkerRanks((), {}, {}, is_open=False)
        self.closed_after: list[float | None] = []

    def wait_for_requests(self, timeout: float) -> float:
        raise AssertionError("there is no request")

    def close(self, timeout: float | None = None) -> None:
        self.closed_after.append(timeout)
