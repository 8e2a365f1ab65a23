"""What a head has to run, stage by stage: from its command line, and from the file of a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor import Executor

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import LoadedPipeline, loaded_pipeline
from vllm_omni_plugin.integration.options.additional_config import without_options
from vllm_omni_plugin.integration.options.compatibility import prepare_engine_args
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Pipeline, Stage
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.stages.api import PythonStageApi
from vllm_omni_plugin.stages.python_stage import PythonStage, stage_class
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher, python_fingerprint
from vllm_omni_plugin.vllm_api.launch.engine_launch import assign_devices, divide_cores
from vllm_omni_plugin.vllm_api.launch.group_launch import new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.requests.moving import has_custom_logits_processors
from vllm_omni_plugin.vllm_api.stages.stage_params import set_server_defaults
from vllm_omni_plugin.vllm_api.stages.stage_requests import VllmStageApi

_SAMPLED = (Modality.TEXT, Modality.TOKENS)
_GENERATE = "generate"
_OF_THE_TOKENIZER = ("tokenizer", "tokenizer mode")
"""Fields of a fingerprint."""

MakeLauncher = Callable[..., Launcher]
"""Makes what starts the local engines of a stage from what is told the id of every process that is started, whether
engines shall report what they have cached, and, False by default, whether heads of other processes use them, with which
no memory can be shared."""


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One stage of a fleet, checked and ready to be started.

    Attributes:
        stage_id: its place among the plans.
        stage: its section of the pipeline's file; None in a fleet without pipeline.
        replicas: how many this node runs itself; every data-parallel rank is one.
        policy: name of its load-balancing policy.
        policy_config: options of that policy; None: all as they are by default.
        make_launcher: see `MakeLauncher`.
        api: of this stage's requests; a `StageApi` in a pipeline.
        fingerprint: what every replica of the stage must have in common.
        vllm_config: vLLM's configuration of its engines; None for a Python stage.
        lockstep: whether its engines compute in groups that die as one.
    """

    stage_id: int
    stage: Stage | None
    replicas: int
    policy: str
    policy_config: dict[str, Any] | None
    make_launcher: MakeLauncher
    api: EngineApi
    fingerprint: Mapping[str, str]
    vllm_config: Any = None
    lockstep: bool = False

    @property
    def name(self) -> str:
        """How messages name the stage."""
        return f"'{self.stage.name}'" if self.stage is not None else str(self.stage_id)


def stage_plans(options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> tuple[StagePlan, ...]:
    """The plans of all stages, in the order of their ids; one without a pipeline. Nothing is started.

    Args:
        options: the head's.
        vllm_config: of AsyncLLM, that is, of the stage that answers prompts. The sampling parameters of the stage that
            the client's are for become its defaults.
        executor_class: vLLM's executor for it.
        log_stats: whether engines report scheduler statistics.

    Raises:
        ConfigError: a stage's engine cannot be configured as the file says, or asks for devices that are not there.
    """
    command = loaded_pipeline(options)
    if command is None:
        return (model_plan(options, vllm_config, executor_class, log_stats),)
    prompt_stage = command.pipeline.prompt_stage
    # Those of all stages, and no fewer than there are API servers.
    engine_count = vllm_config.parallel_config._api_process_count
    args = command.engine_args
    configs = {
        stage.id: vllm_config if stage is prompt_stage else _configured(options, stage, args[stage.id], engine_count)
        for stage in command.pipeline.stages
        if stage.is_vllm
    }
    engine_configs: dict[int, Any] = {}
    ranks: dict[int, int] = {}
    for stage_id, config in configs.items():
        engine_configs[stage_id], ranks[stage_id] = split_ranks(config)
    replicas = {
        stage.id: 0 if options.join else stage.replicas * ranks.get(stage.id, 1) for stage in command.pipeline.stages
    }
    divide_cores(engine_configs.values(), sum(replicas[stage_id] for stage_id in configs))
    devices = _share_devices(options, command, engine_configs, replicas)
    _set_default_sampling(command, configs)
    entry_config = configs[prompt_stage.id]
    entry_api = _vllm_api(options, prompt_stage, entry_config, entry_config)
    plans: list[StagePlan] = []
    # Python stages take the devices that vLLM's have left, and begin again where there is no more.
    first_engine, first_device = 0, devices
    for stage in command.pipeline.stages:
        if stage.is_vllm:
            config, engine_config = configs[stage.id], engine_configs[stage.id]
            executor = Executor.get_class(config)
            make_launcher = partial(new_launcher, without_options(engine_config), executor, log_stats, first_engine)
            api = entry_api if stage is prompt_stage else _vllm_api(options, stage, config, entry_config)
            lockstep = engine_config.parallel_config.data_parallel_size > 1
            plan = partial(StagePlan, stage.id, stage, replicas[stage.id], stage.policy, dict(stage.policy_config))
            plans.append(plan(make_launcher, api, fingerprint(config, stage.id), config, lockstep))
            first_engine += replicas[stage.id]
        else:
            # Where none is run the class need not be installed.
            cost = (stage_class(stage.engine) if replicas[stage.id] else PythonStage).cost
            python_api = PythonStageApi(stage, entry_api.decode, entry_api.encode, entry_api.end_token, cost)
            plans.append(python_plan(stage, replicas[stage.id], python_api, first_device))
            first_device += replicas[stage.id]
    return tuple(plans)


def model_plan(
    options: OmniConfig,
    vllm_config: Any,
    executor_class: Any,
    log_stats: bool,
    launcher: Callable[..., Launcher] = new_launcher,
) -> StagePlan:
    """The plan of the replicas of one model, of a head or a node; the arguments are those of `stage_plans`.

    Args:
        launcher: see `new_launcher`; from the fifth on its arguments are those of a `MakeLauncher`.
    """
    engine_config, ranks = split_ranks(vllm_config)
    replicas = options.dp_size_local * ranks
    model_config = vllm_config.model_config
    divide_cores([engine_config], replicas)
    return StagePlan(
        stage_id=options.stage_id,
        stage=None,
        replicas=replicas,
        policy=options.lb_policy,
        policy_config=options.lb_config,
        make_launcher=partial(launcher, without_options(engine_config), executor_class, log_stats, 0),
        api=EngineApi(has_custom_logits_processors(model_config), vocabulary=model_config.get_vocab_size()),
        fingerprint=fingerprint(vllm_config, options.stage_id),
        vllm_config=vllm_config,
        lockstep=engine_config.parallel_config.data_parallel_size > 1,
    )


def python_plan(stage: Stage, replicas: int, api: EngineApi, first_device: int = 0) -> StagePlan:
    """The plan of a Python stage, whose replicas take devices from this one on."""
    make_launcher = partial(_python_launcher, stage, first_device)
    policy_config = dict(stage.policy_config)
    return StagePlan(
        stage.id, stage, replicas, stage.policy, policy_config, make_launcher, api, python_fingerprint(stage)
    )


def _configured(options: OmniConfig, stage: Stage, engine_args: Any, engines: int) -> Any:
    prepare_engine_args(engine_args, engines)
    try:
        return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    # Whatever a model's configuration makes vLLM and transformers raise.
    except Exception as error:
        raise _fault(options, stage, error) from error


def _fault(options: OmniConfig, stage: Stage, error: Exception) -> ConfigError:
    return ConfigError(f"{options.pipeline}: stage {stage.name!r}: {' '.join(str(error).split())}")


def _share_devices(
    options: OmniConfig, command: LoadedPipeline, configs: Mapping[int, Any], replicas: Mapping[int, int]
) -> int:
    """Give each of vLLM's stages devices of its own; returns how many are taken."""
    taken = 0
    for stage in command.pipeline.stages:
        if stage.is_vllm and "device_ids" not in stage.engine_args:
            try:
                taken += assign_devices(configs[stage.id], taken, replicas[stage.id])
            except ConfigError as error:
                raise _fault(options, stage, error) from error
    return taken


def _set_default_sampling(command: LoadedPipeline, configs: Mapping[int, Any]) -> None:
    pipeline = command.pipeline
    stage = pipeline.sampled_by_client(pipeline.default_modalities)
    if stage is not None and stage.output in _SAMPLED:
        server = configs[pipeline.prompt_stage.id].model_config
        set_server_defaults(server, configs[stage.id].model_config, stage.sampling)


def _python_launcher(
    stage: Stage, first_device: int, on_spawn: Callable[[int], None], report_cache: bool, for_others: bool = False
) -> Launcher:
    return PythonStageLauncher(stage, on_spawn, first_device, share_memory=not for_others)


def _vllm_api(options: OmniConfig, stage: Stage, config: Any, entry_config: Any) -> VllmStageApi:
    try:
        return VllmStageApi(config, entry_config, stage, has_custom_logits_processors(config.model_config))
    except ConfigError as error:
        raise _fault(options, stage, error) from error


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
        front = pipeline.answer_stage_of(pipeline.default_modalities)
        if front is None or not front.is_vllm or _same_tokenizer(plans[front.id], plans[pipeline.prompt_stage.id]):
            return cls(pipeline, configs)
        api = cast(VllmStageApi, plans[front.id].api)
        return cls(pipeline, configs, lambda: api.tokenizer)

    @property
    def prompt_stage(self) -> int:
        """The stage that answers prompts, maybe from a KV cache of another one. AsyncLLM has its configuration."""
        return 0 if self.pipeline is None else self.pipeline.prompt_stage.id

    @property
    def model_stages(self) -> tuple[int, ...]:
        """The stages that run this model: what changes its weights must reach all of them."""
        if self.pipeline is None:
            return (0,)
        model = self.pipeline.prompt_stage.model
        return tuple(stage.id for stage in self.pipeline.stages if stage.is_vllm and stage.model == model)

    @property
    def adapter_stages(self) -> tuple[int, ...]:
        """Those of them that are given the prompt itself: a request for an adapter has it there, and nowhere else."""
        if self.pipeline is None:
            return (0,)
        stages, transform_of = self.pipeline.stages, self.pipeline.transform_of
        given = {stage.id for stage in stages if transform_of(stage) in (None, BuiltInTransform.KV_TRANSFER)}
        return tuple(stage_id for stage_id in self.model_stages if stage_id in given)

    def supported(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """What vLLM's server shall have routes for, given what the model can do."""
        answers_in_text = self.pipeline is not None and Modality.TEXT in self.pipeline.modalities
        return (*tasks, _GENERATE) if answers_in_text and _GENERATE not in tasks else tuple(tasks)


def _same_tokenizer(one: StagePlan, other: StagePlan) -> bool:
    return all(one.fingerprint[field] == other.fingerprint[field] for field in _OF_THE_TOKENIZER)
