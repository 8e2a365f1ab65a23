"""Messages between AsyncLLM's event loop, the coordinator's client and the orchestrator's loop."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from vllm_omni_plugin.admission import AdmissionConfig, QueuePosition, RequestTerms
from vllm_omni_plugin.balancing import Decision, ReplicaLoad, Task
from vllm_omni_plugin.coordinator import HeadLeft, HeadWork, ReplicaInfo, SessionLost, Welcome
from vllm_omni_plugin.coordinator.protocol.head_messages import CallMessageToHead
from vllm_omni_plugin.pipeline import StageOutput


@dataclass(frozen=True, slots=True)
class StageEvent:
    """New output of a stage for a `PipelineCall`; the last one has a `finish_reason`. `stage` is the stage's name."""

    stage: str
    output: StageOutput


@dataclass(frozen=True, slots=True)
class PipelineCallEnded:
    """The last event of a `PipelineCall`; `timings`: see `PipelineRequestState.pipeline_timings`."""

    error: Exception | None
    timings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """What a client asks of a pipeline.

    `put` is called on the orchestrator's thread with each `StageEvent` of the stages in `outputs`, which run anyway,
    and of the final stages of `modalities` that do not answer through vLLM, and at last with a `PipelineCallEnded`. It
    must not block or raise. `sampling` is by the stage's name; `params` are plain data for transforms and Python
    stages.
    """

    modalities: tuple[str, ...]
    put: Callable[[StageEvent | PipelineCallEnded], None]
    outputs: frozenset[str] = frozenset()
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)


ChosenReplicas = list[tuple[str, Decision]]
"""The replicas (`<stage>.<replica>`) to which a request was sent, each with the policy's decision."""


class SubmitRequest(Struct, frozen=True):
    """A new request, or the next chunk of a streaming-input session, submitted at a monotonic time.

    The orchestrator never changes the request. Its thread appends to `chosen_replicas` until the answer begins, and
    sends `RequestStages` if the request is traced.
    """

    request: Any
    submitted_at: float
    chosen_replicas: ChosenReplicas | None = None
    call: PipelineCall | None = None
    traced: bool = False
    terms: RequestTerms | None = None

    @property
    def prompt_tokens(self) -> int:
        request = self.request
        return len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """The client no longer wants these requests; nothing more is delivered for them.

    Unless `whole`, one with a `PipelineCall` ends only its answering stage: vLLM also aborts an answer at a stop
    string.
    """

    request_ids: tuple[str, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class OutputUnusable:
    """The front end cannot process an output of this engine. Comes after the `AbortRequests` of the request."""

    request_id: str
    engine_index: int
    reason: str


RequestMessage = SubmitRequest | AbortRequests | OutputUnusable


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ends with an error instead of a finish reason; `error` is worded for the user of the API."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When a stage worked for a request: in monotonic seconds, from its transform to its end or abort."""

    stage_id: int
    stage: str
    began_at: float
    ended_at: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RequestStages:
    """A traced request has ended in all its stages. Comes once for each, before or after its last output."""

    request_id: str
    stages: tuple[StageTimes, ...]


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A replica that came after the start begins to serve. Comes before its first outputs."""

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
    """An operator call: a method of vLLM's engine core on every replica of some stages (None: all).

    `reply` gets the answers of those that accepted it, in order of stages and replicas, or the error.
    """

    method: str
    args: tuple[Any, ...]
    reply: "Future[list[Any]]"
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RegisterRemoteReplica:
    """A replica of another process has joined or changed. If it does not accept requests it is late or drains."""

    info: ReplicaInfo
    accepts: bool


@dataclass(frozen=True, slots=True)
class UnregisterRemoteReplica:
    """A replica is no longer in the coordinator's list: its requests move, and its id is freed."""

    stage_id: int
    input_addr: str
    output_addr: str
    reason: str


@dataclass(frozen=True, slots=True)
class ManageReplica:
    """An operator's action. drain: no new requests; resume: undo that; remove: move its requests and end it for good.

    `reply` is done when that has begun on all heads (a drain may take longer), or has a `ReplicaError`.
    """

    action: Literal["drain", "resume", "remove"]
    stage_id: int
    replica_id: int
    reply: "Future[None]"


@dataclass(frozen=True, slots=True)
class ReplaceAdmission:
    """Replaces the admission config; `reply` gets the changed values, one line each."""

    config: AdmissionConfig
    reply: "Future[list[str]]"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision that a policy would make now; its position is an index into the candidates, `<stage>.<replica>`.

    If the replica has room the request `may_begin` at once; otherwise it would wait at `queue_position`.
    """

    policy: str
    decision: Decision
    replicas: tuple[tuple[str, ReplicaLoad], ...]
    may_begin: bool
    queue_position: QueuePosition


@dataclass(frozen=True, slots=True)
class Explain:
    """Asks where a request would go now; `reply` may get a `NoReplicaError` or `NoExplanationError`."""

    stage_id: int
    task: Task
    reply: "Future[Explanation]"
    terms: RequestTerms
    priority: int | None


CoordinatorMessage = Welcome | HeadWork | HeadLeft | SessionLost | CallMessageToHead
"""What the coordinator sends to a head, besides the replica list."""
OperatorMessage = CallReplicas | ManageReplica | Explain | ReplaceAdmission
"""What operators want; somebody waits for the reply."""
RpcMessage = OperatorMessage | RegisterRemoteReplica | UnregisterRemoteReplica | CoordinatorMessage
