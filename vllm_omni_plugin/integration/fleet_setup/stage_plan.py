"""What the head has to run for one stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.pipeline.stage import Stage
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi

LauncherFor = Callable[..., Launcher]
"""Makes what starts the local engines of a stage from what is told the id of every process that is started, whether
engines shall report what they have cached, and, False by default, whether heads of other processes use them, with which
no memory can be shared."""


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One stage of a fleet, checked and ready to be started.

    Attributes:
        stage_id: its place among the plans.
        stage: its section of the pipeline's file; None in a fleet without pipeline.
        replicas: how many this node runs itself; every data-parallel rank is one.
        policy: name of its load-balancing policy.
        policy_config: options of that policy; None: all as they are by default.
        launcher_for: see `LauncherFor`.
        api: of this stage's requests; a `StageApi` in a pipeline.
        fingerprint: what every replica of the stage must have in common.
        vllm_config: vLLM's configuration of its engines; None for a Python stage.
        lockstep: whether its engines compute in groups that die as one.
    """

    stage_id: int
    stage: Stage | None
    replicas: int
    policy: str
    policy_config: dict[str, Any] | None
    launcher_for: LauncherFor
    api: EngineApi
    fingerprint: Mapping[str, str]
    vllm_config: Any = None
    lockstep: bool = False

    @property
    def name(self) -> str:
        """How messages name the stage."""
        return f"'{self.stage.name}'" if self.stage is not None else str(self.stage_id)
