"""The state of an unfinished request, and the plan of the pipeline stages that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import field

from vllm_omni_plugin.admission import Ticket, TicketPhase
from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    ChosenReplicas,
    PipelineCall,
    StageTimes,
)
from vllm_omni_plugin.orchestrator.requests.request_owner import OrchestratorRequestState
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage
from vllm_omni_plugin.pipeline.output_reader import OutputReader


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The stages that a request runs through; the same for all requests for the same outputs.

    Attributes:
        roots: stages that begin with the request itself, in topological order.
        entries: where the request is admitted: the first vLLM root and, if that is a prefill, its decode stage.
        downstream: for each needed stage, the needed stages that get its output.
        answer_stage: the stage that answers through vLLM's server; None: no stage does.
        client_sampled: see `Pipeline.sampled_by_client`.
        finals: stages that complete the request.
        readable: stages whose outputs this head reads, for a transform or for the call.
        shown: stages whose outputs are sent to the call.
    """

    roots: tuple[Stage, ...]
    entries: tuple[int, ...]
    downstream: Mapping[int, tuple[Stage, ...]]
    answer_stage: int | None
    client_sampled: int | None
    finals: frozenset[int]
    readable: frozenset[int]
    shown: frozenset[int]


def plan_request(pipeline: Pipeline, call: PipelineCall | None) -> RequestPlan:
    """The plan of a request; without a call, for the default output of the pipeline.

    Raises:
        ValueError: the call asks for a modality that the pipeline does not have.
    """
    modalities = call.modalities if call is not None else pipeline.default_modalities
    needed = pipeline.needed_for(modalities)
    ids = {stage.id for stage in needed}
    downstream = {stage.id: tuple(d for d in pipeline.downstream(stage) if d.id in ids) for stage in needed}
    answering = pipeline.answer_stage_of(modalities)
    answer_stage = None if answering is None else answering.id
    wanted = {stage.id for stage in needed if stage.final and stage.output in modalities}
    if call is None:
        finals, shown = frozenset(wanted if answer_stage is None else {answer_stage}), frozenset[int]()
    else:
        finals = frozenset(wanted)
        shown = (finals - {answer_stage}) | {stage.id for stage in needed if stage.name in call.outputs}
    readable = {
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
    return RequestPlan(
        roots, entries, downstream, answer_stage, client_sampled, finals, frozenset(readable), frozenset(shown)
    )


class PipelineRequestState(OrchestratorRequestState, eq=False, kw_only=True):
    """A request of a pipeline.

    Attributes:
        stage_submit_ts: monotonic seconds at which each stage got its first input, by stage id.
        pipeline_timings: seconds by stage name and part. `transfer`: transforms and building inputs; `queue`: until
            it is sent; `first_output`: from there to the first output; `run`: from being sent to the end.
        readers: of the stages in `plan.readable` that have begun, by stage id.
        chunked_inputs: of stages that work on chunks, by stage id.
        answered: stages that have produced output.
        ended: monotonic seconds at which stages ended, by stage id.
        cache_params: transfer parameters of the prefill's KV cache; None without a prefill.
        cached_tokens: prompt tokens that the prefill found cached; None without a prefill.
        prompt: the prompt as text; None until a transform needs it.
    """

    plan: RequestPlan
    call: PipelineCall | None = None
    stage_submit_ts: dict[int, float] = field(default_factory=dict)
    pipeline_timings: dict[str, dict[str, float]] = field(default_factory=dict)
    chosen_replicas: ChosenReplicas | None = None
    traced: bool = False
    readers: dict[int, OutputReader] = field(default_factory=dict)
    chunked_inputs: dict[int, ChunkedInput] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    ended: dict[int, float] = field(default_factory=dict)
    cache_params: Mapping[str, Any] | None = None
    cached_tokens: int | None = None
    prompt: str | None = None

    @property
    def finished(self) -> bool:
        return self.plan.finals <= self.ended.keys()

    @property
    def answer_tokens(self) -> int:
        run = self.runs.get(self.plan.entries[-1])
        return 0 if run is None else len(run.produced)

    def ticket_at(self, stage: Stage) -> Ticket | None:
        """The request's ticket at a stage. Only at an entry stage may the request still be refused."""
        ticket = self.ticket
        if ticket is None or (stage.id in self.plan.entries and ticket.phase is not TicketPhase.STARTED):
            return ticket
        return ticket.for_later_stage()

    def stage_times(self, stages: Sequence[Stage], now: float) -> tuple[StageTimes, ...]:
        """The times of the stages that have begun, in that order; `now` is the end of unended stages."""
        ended, timings = self.ended, self.pipeline_timings
        return tuple(
            StageTimes(
                stage_id, (name := stages[stage_id].name), began, ended.get(stage_id, now), timings.get(name, {})
            )
            for stage_id, began in self.stage_submit_ts.items()
        )
