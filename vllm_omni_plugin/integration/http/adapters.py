"""Adapters loaded by name through one server of a fleet: known to all of them, forgotten by all."""

import asyncio
from typing import Any

from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.engine_client.server_state_sync import AdapterIdCounter
from vllm_omni_plugin.integration.patching import patch_function
from vllm_omni_plugin.vllm_api.requests.adapter import adapter_digest


def patch_adapter_registry() -> None:
    """Make the registry of vLLM's server the fleet's from now on. Idempotent."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    patch_function(OpenAIServingModels, "init_static_loras", _load_adapters_of_the_command_line)
    patch_function(OpenAIServingModels, "unload_lora_adapter", _unload_adapter)


async def _load_adapters_of_the_command_line(own: Any, models: Any) -> None:
    fleet = _fleet_of(models)
    if fleet is None:
        await own(models)
        return
    fleet.server_state.bind(models)
    for module in fleet.server_state.missing(models.static_lora_modules or ()):
        models.static_lora_modules = [module]
        digest = await asyncio.to_thread(adapter_digest, module.path)
        models.lora_id_counter = AdapterIdCounter([(module.name, module.path, digest)])
        await own(models)


async def _unload_adapter(own: Any, models: Any, request: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    unloaded = models.lora_requests.get(request.lora_name)
    answer = await own(models, request)
    fleet = _fleet_of(models)
    if fleet is not None and unloaded is not None and not isinstance(answer, ErrorResponse):
        try:
            await fleet.forget_lora_async(unloaded.lora_int_id)
        except Exception:
            # The other servers know it still, and this one must to be asked again.
            models.lora_requests.setdefault(request.lora_name, unloaded)
            raise
    return answer


def _fleet_of(models: Any) -> FleetClient | None:
    client = getattr(models.engine_client, "engine_core", None)
    return client if isinstance(client, FleetClient) else None
