"""The stage graph of a pipeline."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from operator import attrgetter

from vllm_omni_plugin.pipeline.checks import ancestors, check_stages
from vllm_omni_plugin.pipeline.stage import Modality, Stage
from vllm_omni_plugin.pipeline.transforms import fitting_transform

_ANSWER_OUTPUTS = (
    frozenset({Modality.TEXT}),
    frozenset({Modality.TOKENS}),
    frozenset({Modality.SCORES, Modality.EMBEDDING}),
)
"""Outputs of stages that can answer through vLLM's server, in order of preference."""


@dataclass(frozen=True)
class Pipeline:
    """An acyclic graph of stages. Every stage leads to a final output. A stage's id is its index here.

    Raises PipelineError if a stage or the graph is invalid, see `checks`. Its place counts stages as they were given.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        check_stages(self.stages)
        for index, stage in enumerate(self.stages):
            fitting_transform(stage, self.upstream(stage), ("stages", index))
        object.__setattr__(self, "stages", tuple(sorted(self.stages, key=attrgetter("id"))))

    @cached_property
    def levels(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages by depth: all inputs of a level's stages are in earlier levels. Sorted by id in a level."""
        sorter = TopologicalSorter({stage.id: [up.id for up in self.upstream(stage)] for stage in self.stages})
        sorter.prepare()
        levels: list[tuple[Stage, ...]] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            sorter.done(*ready)
            levels.append(tuple(self.stages[stage_id] for stage_id in ready))
        return tuple(levels)

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages in topological order, those of one level by id."""
        return tuple(stage for level in self.levels for stage in level)

    @cached_property
    def modalities(self) -> tuple[Modality, ...]:
        """The modalities that a request can ask for: those of the final stages, in topological order."""
        return tuple(dict.fromkeys(stage.output for stage in self.order if stage.final))

    @cached_property
    def default_modalities(self) -> tuple[Modality, ...]:
        """The output of a request without `modalities`: text if the pipeline has text, else everything."""
        return (Modality.TEXT,) if Modality.TEXT in self.modalities else self.modalities

    @cached_property
    def entry(self) -> Stage:
        """The stage whose model reads the prompt: the vLLM stage without inputs that has the lowest id."""
        return next(stage for stage in self.stages if stage.is_vllm and not stage.inputs)

    @cached_property
    def prompt_stage(self) -> Stage:
        """The stage that answers the prompt: the entry, or the decode stage behind it if it is a prefill."""
        return self.downstream(self.entry)[0] if self.entry.output is Modality.KV_CACHE else self.entry

    def answer_stage_of(self, modalities: Collection[str]) -> Stage | None:
        """Return the stage that answers through vLLM's server when these modalities are asked for.

        That is the last final stage with text; without text, the last with tokens; else the last with scores or
        embeddings, which vLLM's pooling routes return. None: no stage answers through vLLM.
        """
        for outputs in _ANSWER_OUTPUTS:
            wanted = outputs.intersection(modalities)
            if stages := [stage for stage in self.order if stage.final and stage.output in wanted]:
                return stages[-1]
        return None

    def sampled_by_client(self, modalities: Collection[str]) -> Stage | None:
        """Return the stage that a client's own sampling parameters are for when it asks for these modalities.

        The stage of `answer_stage_of`, or `prompt_stage` if that is a Python stage. None without an answering stage.
        """
        answering = self.answer_stage_of(modalities)
        return answering if answering is None or answering.is_vllm else self.prompt_stage

    def needed_for(self, modalities: Collection[str]) -> tuple[Stage, ...]:
        """Return the final stages for these modalities, and all inputs of these, in topological order.

        ValueError: there is no modality, or no final stage has it.
        """
        missing = [modality for modality in modalities if modality not in self.modalities]
        if missing or not modalities:
            asked = ", ".join(map(repr, missing)) or "nothing"
            raise ValueError(f"{asked} asked for, but the outputs of this pipeline are {', '.join(self.modalities)}")
        inputs = {stage.name: stage.inputs for stage in self.stages}
        names = ancestors(inputs, [stage.name for stage in self.stages if stage.final and stage.output in modalities])
        return tuple(stage for stage in self.order if stage.name in names)

    def stage(self, name: str) -> Stage:
        """Return the stage of this name. Raises KeyError without one."""
        return self._by_name[name]

    def upstream(self, stage: Stage) -> tuple[Stage, ...]:
        """The stages whose outputs it gets, in the order of its inputs."""
        return tuple(map(self.stage, stage.inputs))

    def downstream(self, stage: Stage) -> tuple[Stage, ...]:
        """The stages that get its output, by id."""
        return tuple(other for other in self.stages if stage.name in other.inputs)

    def transform_of(self, stage: Stage) -> str | None:
        """The name of the transform of its input: its own, or the default; None: it gets the request as it is."""
        return fitting_transform(stage, self.upstream(stage), ("stages", stage.id))

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}
