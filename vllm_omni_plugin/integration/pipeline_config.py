"""What a head has to run, stage by stage: from its command line, and from the file of a pipeline."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor import Executor

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.compatibility import prepare_engine_args
from vllm_omni_plugin.integration.options import without_options
from vllm_omni_plugin.integration.pipeline_command import PipelineCommand, command_of
from vllm_omni_plugin.integration.stage_plan import StagePlan
from vllm_omni_plugin.pipeline import Modality, Stage
from vllm_omni_plugin.replicas.engine_start import Launcher
from vllm_omni_plugin.stages.api import PythonStageApi
from vllm_omni_plugin.stages.fingerprint import python_fingerprint
from vllm_omni_plugin.stages.launcher import PythonStageLauncher
from vllm_omni_plugin.vllm_api.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.group_launch import new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch import share_cores, take_devices
from vllm_omni_plugin.vllm_api.moving import has_custom_logits_processors
from vllm_omni_plugin.vllm_api.stage_requests import VllmStageApi
from vllm_omni_plugin.vllm_api.stage_sampling import set_server_defaults

_SAMPLED = (Modality.TEXT, Modality.TOKENS)


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
    command = command_of(options)
    if command is None:
        return (_only_stage(options, vllm_config, executor_class, log_stats),)
    prompt_stage = command.pipeline.prompt_stage
    # Those of all stages, and no fewer than there are API servers.
    engines = vllm_config.parallel_config._api_process_count
    args = command.engine_args
    configs = {
        stage.id: vllm_config if stage is prompt_stage else _configured(options, stage, args[stage.id], engines)
        for stage in command.pipeline.stages
        if stage.is_vllm
    }
    split = {stage_id: split_ranks(config) for stage_id, config in configs.items()}
    replicas = {
        stage.id: 0 if options.join else stage.replicas * (split[stage.id].ranks if stage.is_vllm else 1)
        for stage in command.pipeline.stages
    }
    engine_configs = {stage_id: engines.config for stage_id, engines in split.items()}
    share_cores(engine_configs.values(), sum(replicas[stage_id] for stage_id in configs))
    devices = _share_devices(options, command, engine_configs, replicas)
    _set_default_sampling(command, configs)
    planner = _Planner(options, command, configs, engine_configs, replicas, devices, log_stats)
    return tuple(map(planner.plan, command.pipeline.stages))


def _only_stage(options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> StagePlan:
    engines = split_ranks(vllm_config)
    replicas = options.dp_size_local * engines.ranks
    model_config = vllm_config.model_config
    share_cores([engines.config], replicas)
    return StagePlan(
        stage_id=0,
        stage=None,
        replicas=replicas,
        policy=options.lb_policy,
        policy_config=options.lb_config,
        launcher_for=partial(_engine_launcher, without_options(engines.config), executor_class, log_stats, 0),
        api=EngineApi(has_custom_logits_processors(model_config), vocabulary=model_config.get_vocab_size()),
        fingerprint=fingerprint(vllm_config, 0),
        vllm_config=vllm_config,
        lockstep=engines.config.parallel_config.data_parallel_size > 1,
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
    options: OmniConfig, command: PipelineCommand, configs: Mapping[int, Any], replicas: Mapping[int, int]
) -> int:
    """Give each of vLLM's stages devices of its own; returns how many are taken."""
    taken = 0
    for stage in command.pipeline.stages:
        if stage.is_vllm and "device_ids" not in stage.engine_args:
            try:
                taken += take_devices(configs[stage.id], taken, replicas[stage.id])
            except ConfigError as error:
                raise _fault(options, stage, error) from error
    return taken


def _set_default_sampling(command: PipelineCommand, configs: Mapping[int, Any]) -> None:
    pipeline = command.pipeline
    stage = pipeline.sampled_by_client(pipeline.default_modalities)
    if stage is not None and stage.output in _SAMPLED:
        server = configs[pipeline.prompt_stage.id].model_config
        set_server_defaults(server, configs[stage.id].model_config, stage.sampling)


def _engine_launcher(
    vllm_config: Any,
    executor_class: Any,
    log_stats: bool,
    first_engine: int,
    on_spawn: Callable[[int], None],
    report_cache: bool,
    for_others: bool = False,
) -> Launcher:
    return new_launcher(vllm_config, executor_class, log_stats, on_spawn, report_cache, first_engine)


class _Planner:
    """Makes the plans of a pipeline's stages, which are numbered in their order on this node."""

    def __init__(
        self,
        options: OmniConfig,
        command: PipelineCommand,
        configs: Mapping[int, Any],
        engine_configs: Mapping[int, Any],
        replicas: Mapping[int, int],
        devices: int,
        log_stats: bool,
    ) -> None:
        self._options = options
        self._configs = configs
        self._engine_configs = engine_configs
        self._replicas = replicas
        self._entry_config = configs[command.pipeline.prompt_stage.id]
        self._log_stats = log_stats
        self._engines = 0
        # Python stages take what vLLM's have left, and begin again where there is no more.
        self._devices = devices
        self._entry_api = self._vllm_api(command.pipeline.prompt_stage)

    def plan(self, stage: Stage) -> StagePlan:
        launcher_for, api, own_fingerprint = (self._vllm_parts if stage.is_vllm else self._python_parts)(stage)
        return StagePlan(
            stage_id=stage.id,
            stage=stage,
            replicas=self._replicas[stage.id],
            policy=stage.policy,
            policy_config=dict(stage.policy_config),
            launcher_for=launcher_for,
            api=api,
            fingerprint=own_fingerprint,
            vllm_config=self._configs.get(stage.id),
            lockstep=stage.is_vllm and self._engine_configs[stage.id].parallel_config.data_parallel_size > 1,
        )

    def _vllm_parts(self, stage: Stage) -> tuple[Callable[..., Launcher], VllmStageApi, dict[str, str]]:
        config = self._configs[stage.id]
        executor_class = Executor.get_class(config)
        engine_config = without_options(self._engine_configs[stage.id])
        launcher_for = partial(_engine_launcher, engine_config, executor_class, self._log_stats, self._engines)
        self._engines += self._replicas[stage.id]
        api = self._entry_api if config is self._entry_config else self._vllm_api(stage)
        return launcher_for, api, fingerprint(config, stage.id)

    def _vllm_api(self, stage: Stage) -> VllmStageApi:
        config = self._configs[stage.id]
        custom_processors = has_custom_logits_processors(config.model_config)
        try:
            return VllmStageApi(config, self._entry_config, stage, custom_processors)
        except ConfigError as error:
            raise _fault(self._options, stage, error) from error

    def _python_parts(self, stage: Stage) -> tuple[Callable[..., Launcher], PythonStageApi, dict[str, str]]:
        first_device = self._devices
        self._devices += self._replicas[stage.id]

        def launcher_for(on_spawn: Callable[[int], None], report_cache: bool, for_others: bool = False) -> Launcher:
            return PythonStageLauncher(stage, on_spawn, first_device, share_memory=not for_others)

        api = PythonStageApi(stage, self._entry_api.decode, self._entry_api.encode, self._entry_api.end_token)
        return launcher_for, api, python_fingerprint(stage)
