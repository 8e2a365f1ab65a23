"""What the dispatchers of all stages of a head share, and what differs."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.dispatch.move_budget import MoveBudget
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics


@dataclass(frozen=True, slots=True)
class HeadContext:
    """Shared by all stages of a head.

    `wake_at` asks for a call of `Dispatcher.tick` at this time or before. Without a gate there is no admission control:
    no run has a ticket or waits for room at a replica. `tag` is part of all engine-side ids of this head only, since
    several heads, or a head before and after its restart, may share an engine.
    """

    clock: Callable[[], float]
    metrics: OrchestratorMetrics
    wake_at: Callable[[float], None]
    moves: MoveBudget
    gate: AdmissionGate | None
    tag: str = field(default_factory=lambda: secrets.token_hex(4))


class HeadRules(NamedTuple):
    """What the flags of a head say about its requests.

    A request moves at most `migration_limit` times in each stage, and waits for `replica_wait` seconds while no replica
    serves. `stall_timeout`: see `StallWatch`. Without `admission`, each request is sent at once.
    """

    migration_limit: int
    replica_wait: float = 60.0
    stall_timeout: float = 0.0
    admission: AdmissionConfig | None = None


class StageRules(NamedTuple):
    """What holds for all requests of a stage.

    Losses with another culprit do not count for `migration_limit`. A request waits for `replica_wait` seconds at most
    while no replica serves; with 0, none does. A stage that `has_upstream` gets outputs of other stages: the fleet has
    accepted all its requests.
    """

    migration_limit: int
    replica_wait: float
    has_upstream: bool = False
