"""What happens to the runs of a stage, as its dispatcher returns it."""

from typing import Any, NamedTuple

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun


class RunDispatched(NamedTuple):
    """The first attempt of a run has been charged to a replica."""

    run: StageRun


class RunFailed(NamedTuple):
    """A run has ended with an error."""

    run: StageRun
    error: OmniError


class RunEnded(NamedTuple):
    """A run has ended, with these `EngineCoreOutputs` in place of its engine's last, or without any."""

    run: StageRun
    outputs: Any | None


RunEvent = RunDispatched | RunFailed | RunEnded
Accepted = tuple[StageRun, Any]
"""A run and an output of its current attempt."""
