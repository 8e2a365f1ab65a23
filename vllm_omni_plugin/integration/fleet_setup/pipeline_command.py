"""`--omni-pipeline FILE`: the stages of the file, and the engine arguments of each, laid over the command line's.

What is read here stays in this process, whose command line it is; vLLM's configuration only carries the file's name. A
command line may hold API keys, and vLLM shows that configuration to whoever asks.
"""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.config import FLAGS, NO_MODEL, OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.fleet_setup.stage_checks import check_class, check_policy, check_transform
from vllm_omni_plugin.integration.options.compatibility import refuse_unsupported
from vllm_omni_plugin.pipeline import Pipeline, PipelineError, Stage, load_pipeline
from vllm_omni_plugin.vllm_api.stages.stage_arguments import DEFAULT_MODEL, StageArgumentParser, read_engine_args
from vllm_omni_plugin.vllm_api.stages.stage_params import check_sampling

_BARE = "omni_pipeline_bare"
"""Attribute of parsed arguments: those without what the file says, for another process that gets them."""


@dataclass(frozen=True)
class LoadedPipeline:
    """What a command line with `--omni-pipeline` is for.

    Attributes:
        pipeline: the stages.
        engine_args: vLLM's, by the ids of vLLM's stages; of a headless node's stage alone.
    """

    pipeline: Pipeline
    engine_args: Mapping[int, Any]


_commands: dict[str, LoadedPipeline] = {}
"""By the file's name."""


def loaded_pipeline(options: OmniConfig) -> LoadedPipeline | None:
    """What this process was started for; None without a pipeline."""
    return None if options.pipeline is None else _commands[options.pipeline]


def pipeline_of(options: OmniConfig) -> Pipeline | None:
    """The pipeline of a command line; None without one."""
    command = loaded_pipeline(options)
    return None if command is None else command.pipeline


def local_engines(options: OmniConfig, headless: bool) -> int:
    """How many of vLLM's engines this process runs itself."""
    pipeline = None if headless else pipeline_of(options)
    if pipeline is None or options.join:
        return options.dp_size_local
    return sum(stage.replicas for stage in pipeline.stages if stage.is_vllm)


def local_processes(args: argparse.Namespace, options: OmniConfig) -> tuple[int, int]:
    """How many replicas this process runs itself, and how many worker processes vLLM's engines start for them.

    Args:
        args: the parsed command line.
        options: ours in it.
    """
    command = loaded_pipeline(options)
    # Of each stage that is run here: how many engines, and vLLM's arguments of each; None: it is no engine of vLLM's.
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
        ranks = 1 if sizes is None else sizes.data_parallel_size
        replicas_here += count * ranks
        of_a_replica = 1 if sizes is None else sizes.tensor_parallel_size * sizes.pipeline_parallel_size
        # A replica that needs but one works in its own process.
        workers += count * ranks * of_a_replica if of_a_replica > 1 else 0
    return replicas_here, workers


def apply_pipeline_file(args: argparse.Namespace, options: OmniConfig, headless: bool) -> None:
    """Read the file, check it, and set in `args` what it says of the stage whose model this process is about.

    That is the one that answers prompts, and on a headless node the one that it serves. Idempotent, also for a process
    that gets the arguments from another one.

    Args:
        args: the parsed command line.
        options: ours in it, with a pipeline.
        headless: whether `--headless` was given.

    Raises:
        ConfigError: something is wrong with the file, in one line with its line and key, or a model was given.
    """
    assert options.pipeline is not None
    bare = getattr(args, _BARE, None)
    if bare is not None and options.pipeline in _commands:
        return
    if bare is None:
        bare = copy.deepcopy(args)
    given = {getattr(bare, "model_tag", None), bare.model} - {None, NO_MODEL, DEFAULT_MODEL}
    if given:
        raise ConfigError(f"argument --omni-pipeline: not allowed with a model ({given.pop()}): the file names them")
    reader = _StageReader(bare, options, headless)
    pipeline = load_pipeline(options.pipeline, [reader.read])
    stage = _own_stage(pipeline, options) if headless else pipeline.prompt_stage
    if stage.is_vllm:
        ours = {flag.destination for flag in FLAGS}
        laid = vars(reader.arguments[stage.id])
        vars(args).update({name: value for name, value in laid.items() if name not in ours})
    else:
        args.model_tag = None
    _commands[options.pipeline] = LoadedPipeline(pipeline, reader.engine_args)
    setattr(args, _BARE, bare)


def _own_stage(pipeline: Pipeline, options: OmniConfig) -> Stage:
    if options.stage_id >= len(pipeline.stages):
        stages = ", ".join(f"{stage.id} ({stage.name})" for stage in pipeline.stages)
        raise ConfigError(f"argument --omni-stage-id: {options.pipeline} has no stage {options.stage_id}: use {stages}")
    return pipeline.stages[options.stage_id]


@dataclass
class _StageReader:
    """Checks the stages that this process has to do with, and reads their engine arguments."""

    args: argparse.Namespace
    options: OmniConfig
    headless: bool
    arguments: dict[int, argparse.Namespace] = field(default_factory=dict)
    """The command line as it is for each of vLLM's stages, without our flags."""
    engine_args: dict[int, Any] = field(default_factory=dict)
    parser: StageArgumentParser = field(default_factory=StageArgumentParser)

    def read(self, pipeline: Pipeline, stage: Stage) -> None:
        """Check one stage, as far as this process has to do with it. Raises `PipelineError`."""
        if self.headless and stage.id != self.options.stage_id:
            return
        if not self.headless:
            check_policy(pipeline, stage)
            check_transform(pipeline, stage)
            if stage.replicas == 0 and not self.options.is_open:
                message = "0 replicas: there must be --omni-master-address, so that others can join"
                raise PipelineError(message, ("replicas",))
        if stage.is_vllm:
            check_sampling(stage, by_client=stage is pipeline.sampled_by_client(pipeline.default_modalities))
            self._read_arguments(stage)
        elif self.headless or (stage.replicas and not self.options.join):
            # Where none is run the class need not be installed.
            check_class(pipeline, stage)

    def _read_arguments(self, stage: Stage) -> None:
        args = copy.deepcopy(self.args)
        for flag in FLAGS:
            # With them, reading vLLM's arguments would come back here.
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
            # vLLM's words for a combination of arguments, which may take several lines.
            raise PipelineError(" ".join(str(error).split()), ("engine_args",)) from error
        self.arguments[stage.id] = args


def _refuse_unsupported(args: argparse.Namespace, place: tuple[str | int, ...]) -> None:
    try:
        refuse_unsupported(args)
    except ConfigError as error:
        raise PipelineError(str(error).partition(": ")[2], place) from None
