"""The state of an unfinished request, and the plan of the pipeline stages that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    `roots` begin with the request itself, in topological order. It is admitted at the `entries`: the first vLLM root
    and, if that is a prefill, its decode stage. `finals` complete it; `answer_stage`, if any, answers through vLLM's
    server. This head reads the outputs of `readable` stages, for a transform or for the call, and sends those that are
    `shown` to the call. For `client_sampled` see `Pipeline.sampled_by_client`.
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
    """The plan of a request; without a call, for the pipeline's default output. ValueError: no such modality."""
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


class PrefilledCache(NamedTuple):
    """What decode must know of a KV cache: its transfer parameters, the tokens that the prefill found cached, and until
    when it must have been asked for. Without parameters the cache is in a store."""

    params: Mapping[str, Any] | None
    cached_tokens: int
    until: float


class PipelineRequestState(OrchestratorRequestState, eq=False, kw_only=True):
    """A request of a pipeline. Readers, inputs and times are by the id of the stage.

    `stage_submit_ts` and `ended`: monotonic seconds of a stage's first input and of its end. `answered` stages have
    produced output. `caches` are by the id of their prefill. `prompt` is text, and None until a transform needs it.
    `pipeline_timings` are seconds by stage name and part. `transfer`: transforms and building inputs; `queue`:
    until it is sent; `first_output`: from there to the first output; `run`: from being sent to the end.
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
    caches: dict[int, PrefilledCache] = field(default_factory=dict)
    prompt: str | None = None

    @property
    def finished(self) -> bool:
        return self.plan.finals <= self.ended.keys()

    @property
    def answer_tokens(self) -> int:
        run = self.runs.get(self.plan.entries[-1])
        return 0 if run is None else len(run.produced)

    def cache_of(self, upstream: Sequence[Stage]) -> PrefilledCache | None:
        """The cache that a stage behind these is to fetch, if there is one."""
        return next((self.caches[stage.id] for stage in upstream if stage.id in self.caches), None)

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
