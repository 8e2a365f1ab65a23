"""The door between AsyncLLM and the engines: with our options set, the fleet stands behind it instead of one engine."""

import os
import time
from functools import wraps
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.client import FleetClient
from vllm_omni_plugin.integration.options import options_of
from vllm_omni_plugin.orchestrator.local_replicas import LocalReplicas
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.thread import OrchestratorThread
from vllm_omni_plugin.vllm_api.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.launch import EngineLauncher, share_cores
from vllm_omni_plugin.vllm_api.ready import apply_ready_responses

_OPEN = "_vllm_omni_plugin_door"


def open_door() -> None:
    """Make AsyncLLM ask us for its engine client from now on. Idempotent.

    Configurations without our options still get vLLM's own client.
    """
    if hasattr(EngineCoreClient.make_async_mp_client, _OPEN):
        return
    own_factory = EngineCoreClient.make_async_mp_client
    own_init = AsyncLLM.__init__
    own_check_health = AsyncLLM.check_health
    own_check_admission = AsyncLLM.check_admission

    @wraps(own_factory)
    def make_async_mp_client(vllm_config: Any, executor_class: Any, log_stats: bool, *args: Any, **kwargs: Any) -> Any:
        options = options_of(vllm_config)
        if options is None:
            return own_factory(vllm_config, executor_class, log_stats, *args, **kwargs)
        renderer = kwargs.get("renderer")
        if renderer is not None:
            renderer.start_mm_warmup_in_background()
        return make_fleet_client(options, vllm_config, executor_class, log_stats)

    @wraps(own_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own_init(self, *args, **kwargs)
        if isinstance(self.engine_core, FleetClient):
            self.engine_core.failures.bind(self.output_processor)

    @wraps(own_check_health)
    async def check_health(self: Any) -> None:
        await own_check_health(self)
        if isinstance(self.engine_core, FleetClient) and not self.engine_core.can_serve:
            raise EngineDeadError

    @wraps(own_check_admission)
    def check_admission(self: Any, *args: Any, **kwargs: Any) -> None:
        own_check_admission(self, *args, **kwargs)
        if isinstance(self.engine_core, FleetClient):
            self.engine_core.check_admission()

    setattr(make_async_mp_client, _OPEN, True)
    EngineCoreClient.make_async_mp_client = staticmethod(make_async_mp_client)
    AsyncLLM.__init__ = init
    AsyncLLM.check_health = check_health
    AsyncLLM.check_admission = check_admission


def make_fleet_client(options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> FleetClient:
    """Start the orchestrator and the local replicas, and return the client in front of them. Blocks until they serve.

    Raises:
        ReplicaError: a local replica did not start. Nothing is left running.
    """
    # Engines are started from a process with threads, at first and after every death; a fork of one may deadlock.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    share_cores(vllm_config, options.dp_size_local)
    api = EngineApi()
    pool = StagePool(0, build_load_balancer_factory(options.lb_policy)())
    orchestrator = Orchestrator([pool], api, options.migration_limit, time.monotonic)
    launcher = EngineLauncher(vllm_config, executor_class, log_stats)

    def local_replicas() -> LocalReplicas:
        return LocalReplicas(orchestrator, 0, options.dp_size_local, launcher, api, time.monotonic)

    thread = OrchestratorThread(orchestrator, local_replicas)
    ready_responses = thread.start()
    return FleetClient(orchestrator, thread, apply_ready_responses(vllm_config, ready_responses))
