"""vLLM's AsyncLLM, with a fleet behind it instead of one engine where our options are set."""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.integration.http.app import patch_app
from vllm_omni_plugin.integration.options.additional_config import exit_usage_error, options_of
from vllm_omni_plugin.integration.patching import patch_function


def patch_async_llm() -> None:
    """Make AsyncLLM ask us for its engine client from now on. Idempotent.

    Configurations without our options still get vLLM's own client.
    """
    patch_app()
    patch_function(EngineCoreClient, "make_async_mp_client", _make_client)
    patch_function(AsyncLLM, "__init__", _init)
    patch_function(AsyncLLM, "check_health", _check_health)
    patch_function(AsyncLLM, "shutdown", _shutdown)


def _make_client(own: Any, vllm_config: Any, executor_class: Any, log_stats: bool, *args: Any, **kwargs: Any) -> Any:
    options = options_of(vllm_config)
    if options is None:
        return own(vllm_config, executor_class, log_stats, *args, **kwargs)
    renderer = kwargs.get("renderer")
    if renderer is not None:
        renderer.start_mm_warmup_in_background()
    try:
        return make_fleet_client(options, vllm_config, executor_class, log_stats)
    except ConfigError as error:
        # Some faults of a command line or a pipeline show only when everything is put together.
        exit_usage_error(error)


def _init(own: Any, server: Any, *args: Any, **kwargs: Any) -> None:
    own(server, *args, **kwargs)
    if isinstance(server.engine_core, FleetClient):
        server.engine_core.bind(server.output_processor, server.logger_manager)


async def _check_health(own: Any, server: Any) -> None:
    await own(server)
    core = server.engine_core
    if not isinstance(core, FleetClient):
        return
    if core.graceful_shutdown.ending or core.head_drain.active or not core.can_serve:
        raise EngineDeadError


def _shutdown(own: Any, server: Any, timeout: float | None = None) -> None:
    core = getattr(server, "engine_core", None)
    if isinstance(core, FleetClient) and core.answers:
        # vLLM's server calls this beside its loop while answers are made, and again when it stops waiting for them.
        # Only then may the renderer close, without which there are none.
        core.shutdown(timeout)
    else:
        own(server, timeout)


def make_fleet_client(options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> FleetClient:
    """Start the fleet and return the client in front of it. Blocks until the local replicas serve.

    Raises:
        ConfigError: a stage cannot be served as it is described, or the coordinator cannot listen where it is told to.
        ReplicaError: a local replica did not start. Nothing is left running.
    """
    fleet = Fleet(options, vllm_config, executor_class, log_stats)
    return FleetClient(fleet, vllm_config, fleet.start())
