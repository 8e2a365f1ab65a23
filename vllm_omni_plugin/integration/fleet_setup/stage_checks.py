"""What can be found out about a pipeline's stages without vLLM: whether all that they name can be used."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import PipelineError, Stage
from vllm_omni_plugin.pipeline.transforms import resolve_transform
from vllm_omni_plugin.stages.python_stage import stage_class


@contextmanager
def _fault_of(key: str) -> Iterator[None]:
    """What is wrong is told with the place of this key in the stage."""
    try:
        yield
    except ConfigError as error:
        raise PipelineError(str(error), (key,)) from error


def check_policy(pipeline: Pipeline, stage: Stage) -> None:
    """Build the load-balancing policy of a stage."""
    with _fault_of("policy"):
        build_load_balancer_factory(stage.policy)
    with _fault_of("policy_config"):
        build_load_balancer_factory(stage.policy, stage.policy_config)


def check_transform(pipeline: Pipeline, stage: Stage) -> None:
    """Import the function in front of a stage."""
    if stage.transform is not None:
        with _fault_of("transform"):
            resolve_transform(stage.transform)


def check_class(pipeline: Pipeline, stage: Stage) -> None:
    """Import the class of a Python stage and see whether it takes the stage's options."""
    if stage.is_vllm:
        return
    with _fault_of("engine"):
        found = stage_class(stage.engine)
    try:
        inspect.signature(found).bind(**stage.options, device="cpu")
    except TypeError as error:
        raise PipelineError(f"{stage.engine} does not take these options: {error}", ("options",)) from error


STAGE_CHECKS = (check_policy, check_transform, check_class)
"""All of them."""
