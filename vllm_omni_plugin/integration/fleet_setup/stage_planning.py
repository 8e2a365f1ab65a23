"""Plans the stages of a head from its command line and pipeline file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from vllm_omni_plugin.stages import PythonStage
from vllm_omni_plugin.stages.api import PythonStageApi
from vllm_omni_plugin.stages.python_stage import stage_class
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher, python_fingerprint
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.engine_messages.moving import has_custom_logits_processors
from vllm_omni_plugin.vllm_api.launch.engine_launch import assign_devices, divide_cores
from vllm_omni_plugin.vllm_api.launch.group_launch import new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.launch.spawning import DeviceTurns, NodeShare
from vllm_omni_plugin.vllm_api.vllm_stages.stage_params import set_server_defaults
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

_SAMPLED = (Modality.TEXT, Modality.TOKENS)
_GENERATE = "generate"
# Fields of a fingerprint.
_TOKENIZER_FIELDS = ("tokenizer", "tokenizer mode")
_CACHE_FIELDS = (
    *("revision", "code revision", "hf-overrides"),
    *("dtype", "KV cache dtype", "quantization", "quantization config"),
)

MakeLauncher = Callable[..., Launcher]
"""Creates the launcher of a stage's local engines, from these arguments: a callback that gets the id of each started
process; whether engines report their prefix caches; the numbers of the replicas in the fleet; `for_others`, False by
default, whether heads of other processes use the engines, with which they cannot share memory; and
`first_incarnation`, see `vllm_api.launch.engine_launch.EngineLauncher`."""


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One stage of a fleet, checked and ready to be started.

    Attributes:
        stage: its section of the pipeline's file; None in a fleet without pipeline.
        replicas: number that this node runs itself; every data-parallel rank is one.
        policy_config: None means the defaults of the policy.
        api: a `StageApi` in a pipeline.
        fingerprint: must be the same for all replicas of the stage.
        vllm_config: None for a Python stage.
        lockstep: whether the engines compute in groups, and all of a group end when one ends.
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
        return f"'{self.stage.name}'" if self.stage is not None else str(self.stage_id)


def stage_plans(options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> tuple[StagePlan, ...]:
    """The plans of all stages, in the order of their ids; without a pipeline, of one stage. Starts nothing.

    The default sampling parameters in AsyncLLM's `vllm_config`, which is of the stage that answers the prompt, become
    those of the stage to which the client's apply. Raises ConfigError if an engine cannot be configured, or lacks
    devices.
    """
    command = loaded_pipeline(options)
    if command is None:
        return (model_plan(options, vllm_config, executor_class, log_stats),)
    prompt_stage = command.pipeline.prompt_stage
    # The engines of all stages, or the API servers if these are more.
    engine_count = vllm_config.parallel_config._api_process_count
    args = command.engine_args
    configs = {
        stage.id: vllm_config if stage is prompt_stage else _engine_config(options, stage, args[stage.id], engine_count)
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
    engines = sum(replicas[stage_id] for stage_id in configs)
    divide_cores(engine_configs.values(), engines)
    devices = _share_devices(options, command, engine_configs, replicas)
    _set_default_sampling(command, configs)
    entry_config = configs[prompt_stage.id]
    entry_api = _vllm_api(options, prompt_stage, entry_config, entry_config)
    turns = DeviceTurns()
    plans: list[StagePlan] = []
    # Python stages take the devices after those of vLLM's stages.
    first_engine, first_device = 0, devices
    for stage in command.pipeline.stages:
        if stage.is_vllm:
            config, engine_config = configs[stage.id], engine_configs[stage.id]
            executor = Executor.get_class(config)
            own_config, share = without_options(engine_config), NodeShare(first_engine, engines, turns)
            make_launcher = partial(new_launcher, own_config, executor, log_stats, share)
            api = entry_api if stage is prompt_stage else _vllm_api(options, stage, config, entry_config)
            lockstep = engine_config.parallel_config.data_parallel_size > 1
            plan = partial(StagePlan, stage.id, stage, replicas[stage.id], stage.policy, dict(stage.policy_config))
            plans.append(plan(make_launcher, api, fingerprint(config, stage.id), config, lockstep))
            first_engine += replicas[stage.id]
        else:
            # The class must be installed only where a replica of it runs.
            cost = (stage_class(stage.engine) if replicas[stage.id] else PythonStage).cost
            python_api = PythonStageApi(stage, entry_api.decode, entry_api.encode, entry_api.end_token, cost)
            plans.append(python_plan(stage, replicas[stage.id], python_api, first_device))
            first_device += replicas[stage.id]
    _require_same_caches(options, command.pipeline, plans)
    return tuple(plans)


def model_plan(
    options: OmniConfig,
    vllm_config: Any,
    executor_class: Any,
    log_stats: bool,
    launcher: Callable[..., Launcher] = new_launcher,
) -> StagePlan:
    """The plan of the replicas of one model. `launcher` has the arguments of `new_launcher`."""
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
        make_launcher=partial(
            launcher, without_options(engine_config), executor_class, log_stats, NodeShare(0, replicas)
        ),
        api=EngineApi(has_custom_logits_processors(model_config), vocabulary=model_config.get_vocab_size()),
        fingerprint=fingerprint(vllm_config, options.stage_id),
        vllm_config=vllm_config,
        lockstep=engine_config.parallel_config.data_parallel_size > 1,
    )


def own_numbers(plans: Sequence[StagePlan]) -> Iterator[range]:
    """The numbers of the replicas that the first head runs itself, by plan: the lowest of the fleet."""
    first = 0
    for plan in plans:
        yield range(first, first + plan.replicas)
        first += plan.replicas


def python_plan(stage: Stage, replicas: int, api: EngineApi, first_device: int = 0) -> StagePlan:
    make_launcher = partial(_python_launcher, stage, first_device)
    policy_config = dict(stage.policy_config)
    return StagePlan(
        stage.id, stage, replicas, stage.policy, policy_config, make_launcher, api, python_fingerprint(stage)
    )


def _engine_config(options: OmniConfig, stage: Stage, engine_args: Any, engines: int) -> Any:
    prepare_engine_args(engine_args, engines)
    # vLLM and transformers raise any kind of error for a model's configuration.
    with _errors_of(options, stage, Exception):
        return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


@contextmanager
def _errors_of(options: OmniConfig, stage: Stage, kind: type[Exception] = ConfigError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{options.pipeline}: stage {stage.name!r}: {message}") from error


def _share_devices(
    options: OmniConfig, command: LoadedPipeline, configs: Mapping[int, Any], replicas: Mapping[int, int]
) -> int:
    """Give each stage of vLLM its own devices; returns the number of devices taken."""
    taken = 0
    for stage in command.pipeline.stages:
        if stage.is_vllm and "device_ids" not in stage.engine_args:
            with _errors_of(options, stage):
                taken += assign_devices(configs[stage.id], taken, replicas[stage.id])
    return taken


def _require_same_caches(options: OmniConfig, pipeline: Pipeline, plans: Sequence[StagePlan]) -> None:
    """Raise ConfigError if a stage would use KV caches of another generation, and so answer for two."""
    for stage in pipeline.stages:
        for source in pipeline.upstream(stage):
            if source.output is not Modality.KV_CACHE:
                continue
            own, theirs = plans[stage.id].fingerprint, plans[source.id].fingerprint
            differing = [
                f"{key} is {own[key]}, and {theirs[key]} there" for key in _CACHE_FIELDS if own[key] != theirs[key]
            ]
            if differing:
                message = f"it cannot use the KV cache of {source.name!r}: {'; '.join(differing)}"
                raise ConfigError(f"{options.pipeline}: stage {stage.name!r}: {message}")


def _set_default_sampling(command: LoadedPipeline, configs: Mapping[int, Any]) -> None:
    """Requests without sampling parameters get the defaults of the stage that the client samples."""
    pipeline = command.pipeline
    stage = pipeline.sampled_by_client(pipeline.default_modalities)
    if stage is not None and stage.output in _SAMPLED:
        server = configs[pipeline.prompt_stage.id].model_config
        set_server_defaults(server, configs[stage.id].model_config, stage.sampling)


def _python_launcher(
    stage: Stage,
    first_device: int,
    on_spawn: Callable[[int], None],
    *,
    report_cache: bool,
    numbers: Sequence[int],
    for_others: bool = False,
    first_incarnation: int = 0,
) -> Launcher:
    return PythonStageLauncher(stage, on_spawn, first_device, share_memory=not for_others)


def _vllm_api(options: OmniConfig, stage: Stage, config: Any, entry_config: Any) -> VllmStageApi:
    with _errors_of(options, stage):
        return VllmStageApi(config, entry_config, stage, has_custom_logits_processors(config.model_config))


@dataclass(frozen=True)
class FleetStages:
    """The stages behind one AsyncLLM.

    Attributes:
        pipeline: None in a fleet of one model.
        configs: vLLM's configuration by stage; None for a Python stage.
        answer_tokenizer: loads the tokenizer of the answer stage; None if it is that of the prompt stage.
        numbers: by stage, the numbers of the head's own replicas.
    """

    pipeline: Pipeline | None
    configs: Sequence[Any]
    answer_tokenizer: Callable[[], Any] | None = None
    numbers: Sequence[range] = ()

    @classmethod
    def of(cls, plans: Sequence[StagePlan]) -> Self:
        """Whether there is a pipeline, and whether its answer needs another tokenizer than the prompt."""
        configs = [plan.vllm_config for plan in plans]
        numbers = tuple(own_numbers(plans))
        stages = tuple(plan.stage for plan in plans if plan.stage is not None)
        if not stages:
            return cls(None, configs, numbers=numbers)
        pipeline = Pipeline(stages)
        answer = pipeline.answer_stage_of(pipeline.default_modalities)
        if answer is None or not answer.is_vllm or _same_tokenizer(plans[answer.id], plans[pipeline.prompt_stage.id]):
            return cls(pipeline, configs, numbers=numbers)
        api = cast(VllmStageApi, plans[answer.id].api)
        return cls(pipeline, configs, lambda: api.tokenizer, numbers)

    @property
    def prompt_stage(self) -> int:
        """The stage that answers the prompt, possibly with the KV cache of a prefill stage. AsyncLLM has its config."""
        return 0 if self.pipeline is None else self.pipeline.prompt_stage.id

    @property
    def model_stages(self) -> tuple[int, ...]:
        """The stages that run the model of the prompt stage: calls that change its weights go to all of them."""
        if self.pipeline is None:
            return (0,)
        model = self.pipeline.prompt_stage.model
        return tuple(stage.id for stage in self.pipeline.stages if stage.is_vllm and stage.model == model)

    @property
    def adapter_stages(self) -> tuple[int, ...]:
        """Those of `model_stages` that get the prompt itself: only they use the LoRA adapter of a request."""
        if self.pipeline is None:
            return (0,)
        stages, transform_of = self.pipeline.stages, self.pipeline.transform_of
        given = {stage.id for stage in stages if transform_of(stage) in (None, BuiltInTransform.KV_TRANSFER)}
        return tuple(stage_id for stage_id in self.model_stages if stage_id in given)

    def supported(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """The tasks for which vLLM's server adds routes; `tasks`: of the prompt stage's model."""
        answers_in_text = self.pipeline is not None and Modality.TEXT in self.pipeline.modalities
        return (*tasks, _GENERATE) if answers_in_text and _GENERATE not in tasks else tuple(tasks)


def _same_tokenizer(one: StagePlan, other: StagePlan) -> bool:
    return all(one.fingerprint[field] == other.fingerprint[field] for field in _TOKENIZER_FIELDS)
