"""LoRA adapters: loading or unloading one by name through one API server applies to all servers of the fleet."""

import asyncio
from typing import Any

from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.server_state_sync import AdapterIdCounter
from vllm_omni_plugin.integration.patching import patch_function
from vllm_omni_plugin.vllm_api.engine_messages.adapter import adapter_digest


def patch_adapter_registry() -> None:
    """Make vLLM's adapter registry the same in all servers of the fleet. Idempotent."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    patch_function(OpenAIServingModels, "init_static_loras", _init_static_loras)
    patch_function(OpenAIServingModels, "unload_lora_adapter", _unload_adapter)


async def _init_static_loras(original: Any, models: Any) -> None:
    fleet = _fleet_of(models)
    if fleet is None:
        await original(models)
        return
    fleet.server_state.bind(models)
    for module in fleet.server_state.missing(models.static_lora_modules or ()):
        models.static_lora_modules = [module]
        digest = await asyncio.to_thread(adapter_digest, module.path)
        models.lora_id_counter = AdapterIdCounter([(module.name, module.path, digest)])
        await original(models)


async def _unload_adapter(original: Any, models: Any, request: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    unloaded = models.lora_requests.get(request.lora_name)
    answer = await original(models, request)
    fleet = _fleet_of(models)
    if fleet is not None and unloaded is not None and not isinstance(answer, ErrorResponse):
        try:
            await fleet.forget_lora_async(unloaded.lora_int_id)
        except Exception:
            # The other servers still have the adapter, so this server keeps it, and the call can be repeated.
            models.lora_requests.setdefault(request.lora_name, unloaded)
            raise
    return answer


def _fleet_of(models: Any) -> FleetClient | None:
    client = getattr(models.engine_client, "engine_core", None)
    return client if isinstance(client, FleetClient) else None
