"""A request on its way through the stages of a pipeline, and which of them it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_omni_plugin.admission.ticket import Ticket, TicketPhase
from vllm_omni_plugin.orchestrator.pipeline.chunked_input import ChunkedInput
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    Dispatches,
    PipelineCall,
    StageTimes,
    SubmitRequest,
)
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage
from vllm_omni_plugin.pipeline.output_reader import OutputReader


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What all requests for the same outputs have in common.

    Attributes:
        roots: stages that begin with the request itself, in topological order.
        entries: where the request comes in: the first root that is vLLM's, and behind it, if it is a prefill, the stage
            that goes on from there and may also begin.
        downstream: for each stage that is needed those that get its output and are needed.
        front: the stage that answers through vLLM's server, None if none does.
        client_sampled: see `Pipeline.sampled_by_client`.
        finals: stages after which the request is complete.
        read: stages whose outputs somebody here reads.
        shown: stages whose outputs are sent to the call.
    """

    roots: tuple[Stage, ...]
    entries: tuple[int, ...]
    downstream: Mapping[int, tuple[Stage, ...]]
    front: int | None
    client_sampled: int | None
    finals: frozenset[int]
    read: frozenset[int]
    shown: frozenset[int]


def plan_request(pipeline: Pipeline, call: PipelineCall | None) -> RequestPlan:
    """The plan of a request.

    Args:
        pipeline: the stages.
        call: what it asks for; None: what the pipeline puts out by default.

    Raises:
        ValueError: it asks for what the pipeline does not put out.
    """
    modalities = call.modalities if call is not None else pipeline.default_modalities
    needed = pipeline.needed_for(modalities)
    ids = {stage.id for stage in needed}
    downstream = {stage.id: tuple(d for d in pipeline.downstream(stage) if d.id in ids) for stage in needed}
    front_stage = pipeline.answer_stage_of(modalities)
    front = None if front_stage is None else front_stage.id
    wanted = {stage.id for stage in needed if stage.final and stage.output in modalities}
    if call is None:
        finals, shown = frozenset(wanted if front is None else {front}), frozenset[int]()
    else:
        finals = frozenset(wanted)
        shown = (finals - {front}) | {stage.id for stage in needed if stage.name in call.outputs}
    read = {
        stage.id
        for stage in needed
        if stage.id in shown or not stage.is_vllm or (downstream[stage.id] and stage.output is not Modality.KV_CACHE)
    }
    roots = tuple(stage for stage in needed if not stage.inputs)
    entry = next((stage for stage in roots if stage.is_vllm), roots[0])
    behind = downstream[entry.id][:1] if entry.output is Modality.KV_CACHE else ()
    entries = (entry.id, *(stage.id for stage in behind))
    sampled = pipeline.sampled_by_client(modalities)
    client_sampled = None if sampled is None else sampled.id
    return RequestPlan(roots, entries, downstream, front, client_sampled, finals, frozenset(read), frozenset(shown))


@dataclass(slots=True, eq=False)
class OrchestratorRequestState:
    """One request from acceptance until every stage that it needs has ended.

    Attributes:
        request: vLLM's `EngineCoreRequest` as the client submitted it.
        submitted_at: monotonic seconds at which it was submitted.
        ticket: its place in the order of all.
        final_stage_id: the stage that answers through vLLM's server; None if what the client wants does not come from
            there.
        final_output_stage_ids: stages whose output the client wants.
        finished_final_output_stage_ids: those of them that have ended.
        sampling_params_list: sampling parameters of the request, by stage id; {} where it has none for a stage.
        stage_submit_ts: monotonic seconds at which each stage was given its first input, by stage id.
        pipeline_timings: seconds by stage name: `transfer` in transforms and building inputs, `queue` until dispatch,
            `first_output` from dispatch to the first output, `run` from dispatch to the end.
        mm_features: processed multimodal inputs of the prompt, as vLLM leaves them.
        call: what the client wants of a pipeline; None for a plain request.
        runs: what stages do for it, by stage id; one for each that has begun.
    """

    request: Any
    submitted_at: float
    ticket: Ticket
    final_stage_id: int | None = 0
    final_output_stage_ids: frozenset[int] = frozenset((0,))
    finished_final_output_stage_ids: set[int] = field(default_factory=set)
    sampling_params_list: tuple[Mapping[str, Any], ...] = ()
    stage_submit_ts: dict[int, float] = field(default_factory=dict)
    pipeline_timings: dict[str, dict[str, float]] = field(default_factory=dict)
    mm_features: Any = None
    call: PipelineCall | None = None
    runs: dict[int, StageRun] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The id under which the client knows the request."""
        request_id: Final[str] = self.request.request_id
        return request_id

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer so far, of the stage where it came in."""
        return len(self.runs[0].produced)

    @property
    def finished(self) -> bool:
        """Whether everything that the client wants has been put out."""
        return self.finished_final_output_stage_ids >= self.final_output_stage_ids


@dataclass(slots=True, eq=False, kw_only=True)
class PipelineRequestState(OrchestratorRequestState):
    """One that runs through the stages of a pipeline.

    Attributes:
        plan: the stages that it needs.
        dispatches: see `SubmitRequest`.
        traced: see `SubmitRequest`.
        readers: read the outputs of the stages in `plan.read` that have begun, by stage id.
        chunked_inputs: inputs of stages that work on chunks, by stage id.
        answered: stages that have put something out.
        ended: monotonic seconds at which stages ended, by stage id.
        cache_params: what a prefill said of the KV cache that it left; None if nothing, or there was none.
        cached_tokens: prompt tokens that the prefill found cached; None if there was no prefill.
        prompt: the request's as text; None until a transform needs it.
    """

    plan: RequestPlan
    dispatches: Dispatches | None = None
    traced: bool = False
    readers: dict[int, OutputReader] = field(default_factory=dict)
    chunked_inputs: dict[int, ChunkedInput] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    ended: dict[int, float] = field(default_factory=dict)
    cache_params: Mapping[str, Any] | None = None
    cached_tokens: int | None = None
    prompt: str | None = None

    @classmethod
    def of(
        cls, message: SubmitRequest, plan: RequestPlan, ticket: Ticket, stages: Sequence[Stage]
    ) -> "PipelineRequestState":
        """The state of a request that has just been submitted."""
        request, call = message.request, message.call
        sampling = {} if call is None else call.sampling
        return cls(
            request,
            message.submitted_at,
            ticket,
            final_stage_id=plan.front,
            final_output_stage_ids=plan.finals,
            sampling_params_list=tuple(sampling.get(stage.name, {}) for stage in stages),
            mm_features=request.mm_features,
            call=call,
            plan=plan,
            dispatches=message.dispatches,
            traced=message.traced,
        )

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer so far, of the stage where it came in or, behind a prefill, that goes on from there."""
        run = self.runs.get(self.plan.entries[-1])
        return 0 if run is None else len(run.produced)

    def ticket_at(self, stage: Stage) -> Ticket:
        """Its place in the order at a stage, where it may be refused only if it comes in there."""
        if stage.id in self.plan.entries and self.ticket.phase is not TicketPhase.STARTED:
            return self.ticket
        return self.ticket.for_later_stage()

    def stage_times(self, stages: Sequence[Stage], now: float) -> tuple[StageTimes, ...]:
        """When the stages that have begun worked for it, in the order of their beginnings.

        Args:
            stages: of the pipeline, by stage id.
            now: monotonic seconds; the end of those that have not ended.
        """
        ended, timings = self.ended, self.pipeline_timings
        return tuple(
            StageTimes(
                stage_id, (name := stages[stage_id].name), began, ended.get(stage_id, now), timings.get(name, {})
            )
            for stage_id, began in self.stage_submit_ts.items()
        )
