"""A client's call of a pipeline, beyond vLLM's request: the outputs that it asks for, and where they go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.pipeline.transfer import StageOutput


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A stage has put something out for the call.

    Attributes:
        stage: its name.
        output: what is new; its `finish_reason` is set with the last.
    """

    stage: str
    output: StageOutput


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Nothing more comes for the call.

    Attributes:
        error: why it ended early; None if all stages that it needs have finished.
        timings: by the stage's name, seconds: see `OrchestratorRequestState.pipeline_timings`.
    """

    error: Exception | None
    timings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """What the client asks of a pipeline.

    Attributes:
        modalities: what it wants put out, each one of `Pipeline.modalities`.
        put: called on the orchestrator's thread with every `StageEvent` of the stages named in `outputs` and of the
            final ones of `modalities` that do not answer through vLLM, and in the end with one `CallEnded`. Must not
            block or raise.
        outputs: names of further stages whose output it wants to see; they run anyway.
        sampling: sampling parameters by the stage's name.
        params: what transforms may read; plain data.
    """

    modalities: tuple[str, ...]
    put: Callable[[StageEvent | CallEnded], None]
    outputs: frozenset[str] = frozenset()
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
