"""`--omni-pipeline FILE`: loads the file, and merges the engine arguments of each stage into the command line's.

The result stays in this process. vLLM's configuration has only the file's name, because vLLM shows its configuration to
everybody who asks, and a command line may have API keys.
"""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.config import FLAGS, NO_MODEL, OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.fleet_setup.stage_checks import HEAD_CHECKS, check_class
from vllm_omni_plugin.integration.options.compatibility import refuse_unsupported
from vllm_omni_plugin.pipeline import Pipeline, PipelineError, Stage, load_pipeline
from vllm_omni_plugin.vllm_api.vllm_stages.stage_arguments import DEFAULT_MODEL, StageArgumentParser, read_engine_args
from vllm_omni_plugin.vllm_api.vllm_stages.stage_params import check_sampling

_ORIGINAL_ARGS = "omni_pipeline_original_args"
"""Attribute of the parsed arguments: a copy of them before the file was applied, for other processes."""


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline, and vLLM's engine arguments by stage id: of all stages on a head, of its own stage on a node."""

    pipeline: Pipeline
    engine_args: Mapping[int, Any]


_loaded: dict[str, LoadedPipeline] = {}
"""By the file's name."""


def loaded_pipeline(options: OmniConfig) -> LoadedPipeline | None:
    """What `apply_pipeline_file` has loaded; None without a pipeline."""
    return None if options.pipeline is None else _loaded[options.pipeline]


def pipeline_of(options: OmniConfig) -> Pipeline | None:
    command = loaded_pipeline(options)
    return None if command is None else command.pipeline


def local_engines(options: OmniConfig, headless: bool) -> int:
    """How many engines this command starts itself: all stages' replicas, or those of the flag."""
    pipeline = None if headless else pipeline_of(options)
    if pipeline is None or options.join:
        return options.dp_size_local
    return sum(stage.replicas for stage in pipeline.stages if stage.is_vllm)


def local_processes(args: argparse.Namespace, options: OmniConfig) -> tuple[int, int]:
    """The number of replicas that this process serves itself, and of the worker processes of vLLM engines here."""
    from vllm.platforms import current_platform

    command = loaded_pipeline(options)
    # By stage: number of engines, and vLLM's arguments of each; None for a Python stage.
    stages: list[tuple[int, Any]]
    if command is None:
        stages = [(options.dp_size_local, args)]
    elif args.headless:
        stages = [(options.dp_size_local, command.engine_args.get(options.stage_id))]
    else:
        replicas = [0 if options.join else stage.replicas for stage in command.pipeline.stages]
        stages = [(count, command.engine_args.get(stage_id)) for stage_id, count in enumerate(replicas)]
    replicas_here = workers = 0
    for count, sizes in stages:
        if sizes is None:
            replicas_here += count
            continue
        ranks, machines = sizes.data_parallel_size, sizes.nnodes or 1
        if ranks > 1 or not sizes.node_rank:
            # Each machine of a lockstep group has some ranks, and of a replica only the first one has the engine.
            replicas_here += count * (ranks // machines if ranks > 1 else 1)
        of_a_replica = sizes.tensor_parallel_size * sizes.pipeline_parallel_size
        # The only worker of an engine runs in the engine's process, but on a CPU.
        has_workers = of_a_replica > 1 or current_platform.is_cpu()
        workers += count * ranks * of_a_replica // machines if has_workers else 0
    return replicas_here, workers


def apply_pipeline_file(args: argparse.Namespace, options: OmniConfig, headless: bool) -> None:
    """Load and check the file, and set the model and engine arguments of one of its stages in `args`. Idempotent.

    On a headless node this is the stage that it serves, on a head the one that answers the prompt. Raises ConfigError
    if the file has an error (the message names line and key), or a model was given.
    """
    assert options.pipeline is not None
    original = getattr(args, _ORIGINAL_ARGS, None)
    if original is not None and options.pipeline in _loaded:
        return
    if original is None:
        original = copy.deepcopy(args)
    given = {getattr(original, "model_tag", None), original.model} - {None, NO_MODEL, DEFAULT_MODEL}
    if given:
        raise ConfigError(f"argument --omni-pipeline: not allowed with a model ({given.pop()}): the file names them")
    reader = _StageReader(original, options, headless)
    pipeline = load_pipeline(options.pipeline, [reader.read])
    stage = _own_stage(pipeline, options) if headless else pipeline.prompt_stage
    if stage.is_vllm:
        ours = {flag.destination for flag in FLAGS}
        of_stage = vars(reader.arguments[stage.id])
        vars(args).update({name: value for name, value in of_stage.items() if name not in ours})
    else:
        args.model_tag = None
    _loaded[options.pipeline] = LoadedPipeline(pipeline, reader.engine_args)
    setattr(args, _ORIGINAL_ARGS, original)


def _own_stage(pipeline: Pipeline, options: OmniConfig) -> Stage:
    if options.stage_id >= len(pipeline.stages):
        stages = ", ".join(f"{stage.id} ({stage.name})" for stage in pipeline.stages)
        raise ConfigError(f"argument --omni-stage-id: {options.pipeline} has no stage {options.stage_id}: use {stages}")
    return pipeline.stages[options.stage_id]


@dataclass
class _StageReader:
    args: argparse.Namespace
    options: OmniConfig
    headless: bool
    arguments: dict[int, argparse.Namespace] = field(default_factory=dict)
    """By stage of vLLM: the command line with the stage's engine arguments, and without our flags."""
    engine_args: dict[int, Any] = field(default_factory=dict)
    parser: StageArgumentParser = field(default_factory=StageArgumentParser)

    def read(self, pipeline: Pipeline, stage: Stage) -> None:
        """Check one stage, as far as it concerns this process. Raises `PipelineError`."""
        if self.headless and stage.id != self.options.stage_id:
            return
        if not self.headless:
            for check in HEAD_CHECKS:
                check(pipeline, stage)
            if stage.replicas == 0 and not self.options.is_open:
                message = "0 replicas: there must be --omni-master-address, so that others can join"
                raise PipelineError(message, ("replicas",))
        if stage.is_vllm:
            check_sampling(stage, by_client=stage is pipeline.sampled_by_client(pipeline.default_modalities))
            self._read_arguments(stage)
        elif self.headless or (stage.replicas and not self.options.join):
            # The class must be installed only where a replica of it runs.
            check_class(pipeline, stage)

    def _read_arguments(self, stage: Stage) -> None:
        args = copy.deepcopy(self.args)
        for flag in FLAGS:
            # With our flags set, `read_engine_args` would call this function again.
            setattr(args, flag.destination, None)
        args.model = stage.model
        try:
            for place in self.parser.override(args, stage.engine_args):
                _refuse_unsupported(args, place)
            args.model_tag = stage.model
            self.engine_args[stage.id] = read_engine_args(args)
        except (ValueError, TypeError) as error:
            if isinstance(error, PipelineError):
                raise
            # vLLM's message may have several lines.
            raise PipelineError(" ".join(str(error).split()), ("engine_args",)) from error
        self.arguments[stage.id] = args


def _refuse_unsupported(args: argparse.Namespace, place: tuple[str | int, ...]) -> None:
    try:
        refuse_unsupported(args)
    except ConfigError as error:
        raise PipelineError(str(error).partition(": ")[2], place) from None
