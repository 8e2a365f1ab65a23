"""Which stages of a pipeline a request needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_plugin.orchestrator.requests.pipeline_call import PipelineCall
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage


@dataclass(frozen=True, slots=True)
class Plan:
    """What all requests for the same outputs have in common.

    Attributes:
        roots: stages that begin with the request itself, in topological order.
        downstream: for each stage that is needed those that get its output and are needed.
        front: the stage that answers through vLLM's server, None if none does.
        client_sampled: see `Pipeline.sampled_by_client`.
        finals: stages after which the request is complete.
        read: stages whose outputs somebody here reads.
        shown: stages whose outputs are sent to the call.
    """

    roots: tuple[Stage, ...]
    downstream: Mapping[int, tuple[Stage, ...]]
    front: int | None
    client_sampled: int | None
    finals: frozenset[int]
    read: frozenset[int]
    shown: frozenset[int]


def make_plan(pipeline: Pipeline, call: PipelineCall | None) -> Plan:
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
    front_stage = pipeline.front_of(modalities)
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
    sampled = pipeline.sampled_by_client(modalities)
    client_sampled = None if sampled is None else sampled.id
    return Plan(roots, downstream, front, client_sampled, finals, frozenset(read), frozenset(shown))
