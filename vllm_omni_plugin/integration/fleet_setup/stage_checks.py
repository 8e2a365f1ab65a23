"""Checks of a pipeline's stages that do not need vLLM: policies, transforms and classes exist, and it can answer."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline import ANSWERS, Pipeline, PipelineError, Stage
from vllm_omni_plugin.pipeline.transforms import resolve_transform
from vllm_omni_plugin.stages.python_stage import stage_class


@contextmanager
def _located_at(key: str) -> Iterator[None]:
    """Turn a ConfigError into a PipelineError that names this key of the stage."""
    try:
        yield
    except ConfigError as error:
        raise PipelineError(str(error), (key,)) from error


def check_policy(pipeline: Pipeline, stage: Stage) -> None:
    with _located_at("policy"):
        build_load_balancer_factory(stage.policy)
    with _located_at("policy_config"):
        build_load_balancer_factory(stage.policy, stage.policy_config)


def check_transform(pipeline: Pipeline, stage: Stage) -> None:
    if stage.transform is not None:
        with _located_at("transform"):
            resolve_transform(stage.transform)


def check_class(pipeline: Pipeline, stage: Stage) -> None:
    if stage.is_vllm:
        return
    with _located_at("engine"):
        found = stage_class(stage.engine)
    try:
        inspect.signature(found).bind(**stage.options, device="cpu")
    except TypeError as error:
        raise PipelineError(f"{stage.engine} does not take these options: {error}", ("options",)) from error


def check_answer(pipeline: Pipeline, stage: Stage) -> None:
    """A server with a model that generates has no routes that return scores or embeddings, and none has images."""
    entry = pipeline.prompt_stage
    if stage.final and entry.output in ANSWERS and ANSWERS.isdisjoint(pipeline.modalities):
        message = (
            f"{stage.output} alone cannot answer a prompt of {entry.name!r}, which generates: make a stage with text, "
            "tokens or audio final"
        )
        raise PipelineError(message, ("output",))


HEAD_CHECKS = (check_policy, check_transform, check_answer)
STAGE_CHECKS = (*HEAD_CHECKS, check_class)
