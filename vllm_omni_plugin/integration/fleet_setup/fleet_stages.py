"""Which stages of a fleet are asked what, and whose configurations its engines complete."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Modality
from vllm_omni_plugin.pipeline.transforms import BuiltInTransform
from vllm_omni_plugin.vllm_api.stages.stage_requests import VllmStageApi

_GENERATE = "generate"
_OF_THE_TOKENIZER = ("tokenizer", "tokenizer mode")
"""Fields of a fingerprint."""


@dataclass(frozen=True)
class FleetStages:
    """The stages behind one AsyncLLM.

    Attributes:
        pipeline: how they hang together; None for the replicas of one model.
        configs: vLLM's configuration of each stage's engines, by stage; None for a Python stage.
        front_tokenizer: loads the tokenizer in whose tokens text answers come; None where that is the prompt's.
    """

    pipeline: Pipeline | None
    configs: Sequence[Any]
    front_tokenizer: Callable[[], Any] | None = None

    @classmethod
    def of(cls, plans: Sequence[StagePlan]) -> Self:
        """The stages of these plans, given by stage."""
        configs = [plan.vllm_config for plan in plans]
        stages = tuple(plan.stage for plan in plans if plan.stage is not None)
        if not stages:
            return cls(None, configs)
        pipeline = Pipeline(stages)
        front = pipeline.front_of(pipeline.default_modalities)
        if front is None or not front.is_vllm or _same_tokenizer(plans[front.id], plans[pipeline.prompt_stage.id]):
            return cls(pipeline, configs)
        api = cast(VllmStageApi, plans[front.id].api)
        return cls(pipeline, configs, lambda: api.tokenizer)

    @property
    def prompt_stage(self) -> int:
        """The stage that answers prompts, maybe from a KV cache of another one. AsyncLLM has its configuration."""
        return 0 if self.pipeline is None else self.pipeline.prompt_stage.id

    @property
    def of_the_model(self) -> tuple[int, ...]:
        """The stages that run this model: what changes its weights must reach all of them."""
        if self.pipeline is None:
            return (0,)
        model = self.pipeline.prompt_stage.model
        return tuple(stage.id for stage in self.pipeline.stages if stage.is_vllm and stage.model == model)

    @property
    def of_the_prompt(self) -> tuple[int, ...]:
        """Those of them that are given the prompt itself: a request for an adapter has it there, and nowhere else."""
        if self.pipeline is None:
            return (0,)
        stages, transform_of = self.pipeline.stages, self.pipeline.transform_of
        given = {stage.id for stage in stages if transform_of(stage) in (None, BuiltInTransform.KV_TRANSFER)}
        return tuple(stage_id for stage_id in self.of_the_model if stage_id in given)

    def supported(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """What vLLM's server shall have routes for, given what the model can do."""
        answers_in_text = self.pipeline is not None and Modality.TEXT in self.pipeline.modalities
        return (*tasks, _GENERATE) if answers_in_text and _GENERATE not in tasks else tuple(tasks)


def _same_tokenizer(one: StagePlan, other: StagePlan) -> bool:
    return all(one.fingerprint[field] == other.fingerprint[field] for field in _OF_THE_TOKENIZER)
