"""Patches AsyncLLM: with our options, it gets a client of the fleet instead of a client of one engine."""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.integration.http.app import patch_app
from vllm_omni_plugin.integration.options.additional_config import exit_usage_error, options_of
from vllm_omni_plugin.integration.patching import patch_function


def patch_async_llm() -> None:
    """Make AsyncLLM use `FleetClient` for configurations with our options. Idempotent."""
    patch_app()
    patch_function(EngineCoreClient, "make_async_mp_client", _make_client)
    patch_function(AsyncLLM, "__init__", _init)
    patch_function(AsyncLLM, "check_health", _check_health)
    patch_function(AsyncLLM, "shutdown", _shutdown)


def _make_client(
    original: Any, vllm_config: Any, executor_class: Any, log_stats: bool, *args: Any, **kwargs: Any
) -> Any:
    """With our options a head's client for the whole fleet, else vLLM's own; errors that show now end with usage."""
    options = options_of(vllm_config)
    if options is None:
        return original(vllm_config, executor_class, log_stats, *args, **kwargs)
    renderer = kwargs.get("renderer")
    if renderer is not None:
        renderer.start_mm_warmup_in_background()
    try:
        return make_fleet_client(options, vllm_config, executor_class, log_stats)
    except ConfigError as error:
        # Some errors of a command line or a pipeline show only when the fleet is built.
        exit_usage_error(error)


def _init(original: Any, server: Any, *args: Any, **kwargs: Any) -> None:
    original(server, *args, **kwargs)
    if isinstance(server.engine_core, FleetClient):
        server.engine_core.bind(server.output_processor, server.logger_manager)


async def _check_health(original: Any, server: Any) -> None:
    """As vLLM, and unhealthy while the head ends, is drained or has no replica of a needed stage."""
    await original(server)
    core = server.engine_core
    if not isinstance(core, FleetClient):
        return
    if core.graceful_shutdown.ending or core.head_drain.active or not core.orchestrator.can_serve:
        raise EngineDeadError


def _shutdown(original: Any, server: Any, timeout: float | None = None) -> None:
    core = getattr(server, "engine_core", None)
    if isinstance(core, FleetClient) and core.can_finish_requests:
        # vLLM's server calls this in another thread while responses are still being made, and again afterwards. Only
        # the second call may close the renderer, which responses need.
        core.shutdown(timeout)
    else:
        original(server, timeout)


def make_fleet_client(options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> FleetClient:
    """Start a fleet and return its client. Blocks until the local replicas serve; raises as `Fleet` and its `start`."""
    fleet = Fleet(options, vllm_config, executor_class, log_stats)
    return FleetClient(fleet, vllm_config, fleet.start())
