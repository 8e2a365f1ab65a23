"""Adapters loaded by name through one server of a fleet: known to all of them, forgotten by all."""

import asyncio
from functools import wraps
from typing import Any

from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.engine_client.peer_front import AdapterIds
from vllm_omni_plugin.vllm_api.requests.digests import adapter_digest

_OPEN = "_vllm_omni_plugin_adapters"


def open_adapters() -> None:
    """Make the registry of vLLM's server the fleet's from now on. Idempotent."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    own_init, own_unload = OpenAIServingModels.init_static_loras, OpenAIServingModels.unload_lora_adapter
    if hasattr(own_init, _OPEN):
        return

    @wraps(own_init)
    async def init_static_loras(self: Any) -> None:
        fleet = _fleet_of(self)
        if fleet is None:
            await own_init(self)
            return
        fleet.peer_front.bind(self)
        for module in fleet.peer_front.missing(self.static_lora_modules or ()):
            self.static_lora_modules = [module]
            digest = await asyncio.to_thread(adapter_digest, module.path)
            self.lora_id_counter = AdapterIds([(module.name, module.path, digest)])
            await own_init(self)

    @wraps(own_unload)
    async def unload_lora_adapter(self: Any, request: Any) -> Any:
        unloaded = self.lora_requests.get(request.lora_name)
        answer = await own_unload(self, request)
        fleet = _fleet_of(self)
        if fleet is not None and unloaded is not None and not isinstance(answer, ErrorResponse):
            try:
                await fleet.forget_lora_async(unloaded.lora_int_id)
            except Exception:
                # The other servers know it still, and this one must to be asked again.
                self.lora_requests.setdefault(request.lora_name, unloaded)
                raise
        return answer

    setattr(init_static_loras, _OPEN, True)
    OpenAIServingModels.init_static_loras = init_static_loras
    OpenAIServingModels.unload_lora_adapter = unload_lora_adapter


def _fleet_of(models: Any) -> FleetClient | None:
    client = getattr(models.engine_client, "engine_core", None)
    return client if isinstance(client, FleetClient) else None
