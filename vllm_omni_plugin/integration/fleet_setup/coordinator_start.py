"""Starts the coordinator of a fleet."""

from collections.abc import Mapping, Sequence

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import OmniCoordinatorRuntime
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan
from vllm_omni_plugin.integration.options.listening import log_join_command, warn_if_insecure


def start_coordinator(
    options: OmniConfig,
    plans: Sequence[StagePlan],
    address: str,
    port: int,
    first_replica_ids: Mapping[int, int] | None = None,
) -> OmniCoordinatorRuntime:
    """Start the coordinator process, and log how nodes and heads join, unless the port is 0. Raises ConfigError."""
    warn_if_insecure(options, address)
    coordinator = OmniCoordinatorRuntime(
        address,
        port,
        options.heartbeat_timeout,
        secret_file=options.secret_file,
        first_replica_ids=first_replica_ids,
        reserved_numbers=sum(plan.replicas for plan in plans),
        fingerprints={plan.stage_id: plan.fingerprint for plan in plans},
    )
    if port:
        log_join_command(options, address)
    return coordinator
