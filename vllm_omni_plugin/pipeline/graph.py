"""The graph of the stages of a pipeline."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from operator import attrgetter

from vllm_omni_plugin.documents import Place
from vllm_omni_plugin.pipeline.checks import ancestors, check_stages
from vllm_omni_plugin.pipeline.stage import Modality, Stage
from vllm_omni_plugin.pipeline.transforms import fitting_transform

_FRONT_OUTPUTS = (
    frozenset({Modality.TEXT}),
    frozenset({Modality.TOKENS}),
    frozenset({Modality.SCORES, Modality.EMBEDDING}),
)
"""Outputs with which a stage can answer through vLLM's server, in order of preference."""


@dataclass(frozen=True)
class Pipeline:
    """Stages whose outputs are inputs of others, without cycles. Every stage leads to a final output.

    Attributes:
        stages: in the order of their ids, so that a stage's id is its index, whatever order they were given in.

    Raises:
        PipelineError: an id, name or input is wrong, there is a cycle, no stage is final, a stage reaches no final
            one, a transform, chunks or a KV cache do not fit, or no stage can read a prompt. Its place counts stages
            as they were given.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        check_stages(self.stages)
        for index, stage in enumerate(self.stages):
            fitting_transform(stage, self.upstream(stage), ("stages", index))
        object.__setattr__(self, "stages", tuple(sorted(self.stages, key=attrgetter("id"))))

    @cached_property
    def levels(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages by depth: each level comes after all inputs of its stages. Lower ids come first in a level."""
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
        """The stages in topological order; lower ids come first in a level."""
        return tuple(stage for level in self.levels for stage in level)

    @cached_property
    def modalities(self) -> tuple[Modality, ...]:
        """What a request can ask for: the modalities of the final outputs, in topological order."""
        return tuple(dict.fromkeys(stage.output for stage in self.order if stage.final))

    @cached_property
    def default_modalities(self) -> tuple[Modality, ...]:
        """What a request gets that does not say what it wants: text if there is any, else everything."""
        return (Modality.TEXT,) if Modality.TEXT in self.modalities else self.modalities

    @cached_property
    def entry(self) -> Stage:
        """The stage whose model reads the request's prompt: vLLM's without inputs, the one with the lowest id."""
        return next(stage for stage in self.stages if stage.is_vllm and not stage.inputs)

    @cached_property
    def prompt_stage(self) -> Stage:
        """The stage that answers the request's prompt: the entry, or the one that its KV cache is handed to."""
        return self.downstream(self.entry)[0] if self.entry.output is Modality.KV_CACHE else self.entry

    def answer_stage_of(self, modalities: Collection[str]) -> Stage | None:
        """Return the stage that answers through vLLM's server when these modalities are asked for.

        The last final stage that puts out text; without one among what is asked for, the last of tokens, or else the
        last of scores or embeddings, which vLLM's pooling routes return. None: what is asked for goes another way.
        """
        for outputs in _FRONT_OUTPUTS:
            wanted = outputs.intersection(modalities)
            if front := [stage for stage in self.order if stage.final and stage.output in wanted]:
                return front[-1]
        return None

    def sampled_by_client(self, modalities: Collection[str]) -> Stage | None:
        """Return the stage that a client's own sampling parameters are for when it asks for these modalities.

        The stage of `answer_stage_of`, or `prompt_stage` if that is a Python stage. None without an answering stage.
        """
        front = self.answer_stage_of(modalities)
        return front if front is None or front.is_vllm else self.prompt_stage

    def needed_for(self, modalities: Collection[str]) -> tuple[Stage, ...]:
        """Return the stages that a request runs through: all final ones of these modalities and what leads to them.

        Args:
            modalities: those asked for, at least one.

        Returns:
            The stages in topological order.

        Raises:
            ValueError: none is asked for, or one that no final stage puts out.
        """
        missing = [modality for modality in modalities if modality not in self.modalities]
        if missing or not modalities:
            asked = ", ".join(map(repr, missing)) or "nothing"
            raise ValueError(f"{asked} asked for, but this pipeline puts out {', '.join(self.modalities)}")
        inputs = {stage.name: stage.inputs for stage in self.stages}
        names = ancestors(inputs, [stage.name for stage in self.stages if stage.final and stage.output in modalities])
        return tuple(stage for stage in self.order if stage.name in names)

    def stage(self, name: str) -> Stage:
        """Return the stage of this name. Raises KeyError without one."""
        return self._by_name[name]

    def upstream(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages whose outputs it gets, in the order of its inputs."""
        return tuple(map(self.stage, stage.inputs))

    def downstream(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages that get its output, in the order of their ids."""
        return tuple(other for other in self.stages if stage.name in other.inputs)

    def transform_of(self, stage: Stage) -> str | None:
        """Return what turns the outputs of `upstream(stage)` into its input; None: it gets the request as it is.

        A `BuiltInTransform` or `package.module:function`: the stage's own, else the built-in one that fits.
        """
        place: Place = ("stages", stage.id)
        return fitting_transform(stage, self.upstream(stage), place)

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}
