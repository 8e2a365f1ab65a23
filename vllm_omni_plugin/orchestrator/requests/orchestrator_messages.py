"""What crosses between AsyncLLM's event loop and the orchestrator's."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_omni_plugin.admission import AdmissionConfig, QueuePosition, RequestTerms
from vllm_omni_plugin.balancing import Decision, ReplicaLoad, Task
from vllm_omni_plugin.coordinator import HeadLeft, PeerWork, ReplicaInfo, SessionLost, Welcome
from vllm_omni_plugin.coordinator.protocol.head_messages import CallMessageToHead
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
class PipelineCallEnded:
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
            final ones of `modalities` that do not answer through vLLM, and finally with one `PipelineCallEnded`. Must
            not block or raise.
        outputs: names of further stages whose output it wants to see; they run anyway.
        sampling: sampling parameters by the stage's name.
        params: what transforms may read; plain data.
    """

    modalities: tuple[str, ...]
    put: Callable[[StageEvent | PipelineCallEnded], None]
    outputs: frozenset[str] = frozenset()
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)


Dispatches = list[tuple[str, Decision]]
"""Where a request went, as `<stage>.<replica>`, and why: one entry for each dispatch until an answer begins."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A new request, or the next chunk of a streaming-input one.

    Attributes:
        request: vLLM's `EngineCoreRequest`; the orchestrator reads it and never changes it.
        submitted_at: monotonic seconds at which the client handed it over.
        dispatches: the orchestrator's thread appends to it; None if nobody asks.
        call: what the client wants of a pipeline; None for a request that says nothing of one.
        traced: whether `RequestStages` shall tell what a pipeline's stages did for it.
        terms: what its client said of its place and time; None where nobody was asked.
    """

    request: Any
    submitted_at: float
    dispatches: Dispatches | None = None
    call: PipelineCall | None = None
    traced: bool = False
    terms: RequestTerms | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt, or embeddings in their place."""
        request = self.request
        return len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """The client no longer wants these requests; nothing more is delivered for them.

    Attributes:
        whole: with everything that a pipeline does for them. Otherwise, of a request with a `PipelineCall`, only what
            answers through vLLM's server, which aborts what it ends at a stop string, too.
    """

    request_ids: tuple[str, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class OutputUnusable:
    """AsyncLLM's side could not process an output. Comes after the `AbortRequests` of the request.

    Attributes:
        request_id: the request.
        engine_index: of the replica that sent it.
        reason: what was raised over it.
    """

    request_id: str
    engine_index: int
    reason: str


RequestMessage = SubmitRequest | AbortRequests | OutputUnusable
"""What AsyncLLM's side says of requests."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ends with an error instead of a finish reason.

    Attributes:
        error: `NoReplicaError`, `RequestRefusedError` or `RequestLostError`, worded for the API's user.
    """

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When a stage worked for a request.

    Attributes:
        stage_id: its id.
        stage: its name.
        began_at: monotonic seconds at which its input began to be made.
        ended_at: monotonic seconds at which it ended, or was no longer wanted.
        parts: seconds, see `OrchestratorRequestState.pipeline_timings`.
    """

    stage_id: int
    stage: str
    began_at: float
    ended_at: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RequestStages:
    """A traced request has ended in all its stages. Comes once for each, around its last output."""

    request_id: str
    stages: tuple[StageTimes, ...]


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A replica that was not there at the start serves from now on; comes before its first outputs.

    Attributes:
        ready_response: what its engine said of itself when it was ready, as vLLM encoded it.
    """

    stage_id: int
    replica_id: int
    ready_response: bytes


@dataclass(frozen=True, slots=True)
class ReplicaLeft:
    """A replica has left for good, and its id is free."""

    stage_id: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class CallReplicas:
    """A utility call for every replica of some stages.

    Attributes:
        method: method of vLLM's engine core.
        args: its positional arguments, plain data or structs that vLLM's encoder knows.
        reply: receives a list of results, one per replica that answered, in order of stages and replicas, or the error.
        stages: the stages, in order; None: all.
    """

    method: str
    args: tuple[Any, ...]
    reply: "Future[list[Any]]"
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RegisterRemoteReplica:
    """A replica of another process is there, or has changed: attach to it, or act on its new status.

    Attributes:
        info: as the coordinator published it.
        accepts: whether it takes new requests; False: suspected of being dead, or draining.
    """

    info: ReplicaInfo
    accepts: bool


@dataclass(frozen=True, slots=True)
class UnregisterRemoteReplica:
    """A replica is no longer in the coordinator's list: its requests move, and what belongs to it is freed."""

    stage_id: int
    input_addr: str
    output_addr: str
    reason: str


@dataclass(frozen=True, slots=True)
class ManageReplica:
    """The administrator's wish for one replica.

    Attributes:
        action: drain: no new requests; resume: undo that; remove: its requests move, it ends and does not come back.
        stage_id: its stage.
        replica_id: its id in that stage.
        reply: done when the wish is granted (not when a drain has come to its end), or the `ReplicaError` that says
            why it is not.
    """

    action: Literal["drain", "resume", "remove"]
    stage_id: int
    replica_id: int
    reply: "Future[None]"


@dataclass(frozen=True, slots=True)
class ReplaceAdmission:
    """Replaces the admission config.

    Attributes:
        reply: gets the changed values, one line each.
    """

    config: AdmissionConfig
    reply: "Future[list[str]]"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision that was not carried out.

    Attributes:
        policy: the policy's name.
        decision: what it would decide.
        replicas: those it could choose from, as `<stage>.<replica>`, and their loads, at the positions that the
            decision speaks of.
        may_begin: whether the chosen one could begin it in its next steps, so that it would be sent at once.
        queue_position: where it would stand in the queue otherwise.
    """

    policy: str
    decision: Decision
    replicas: tuple[tuple[str, ReplicaLoad], ...]
    may_begin: bool
    queue_position: QueuePosition


@dataclass(frozen=True, slots=True)
class Explain:
    """The question where a request would go now. Nothing is run or remembered.

    Attributes:
        stage_id: the stage that is asked.
        task: what its policy may know of the request.
        reply: the explanation, or the `NoReplicaError` or `NoExplanationError` why there is none.
        terms: what its client would say.
        priority: OpenAI's; None if it is not known.
    """

    stage_id: int
    task: Task
    reply: "Future[Explanation]"
    terms: RequestTerms
    priority: int | None


Membership = RegisterRemoteReplica | UnregisterRemoteReplica | ManageReplica
"""What changes who serves."""
CoordinatorMessage = Welcome | PeerWork | HeadLeft | SessionLost | CallMessageToHead
"""What a head hears of the coordinator, but for replicas."""
RpcMessage = CallReplicas | Membership | Explain | ReplaceAdmission | CoordinatorMessage
