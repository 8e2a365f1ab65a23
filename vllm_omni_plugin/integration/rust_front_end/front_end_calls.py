"""Calls that one start of the front end makes to its engine, made to the fleet."""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import convert
from msgspec.structs import replace
from vllm.lora.request import LoRARequest

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.integration.engine_client.server_state_sync import adapter_id
from vllm_omni_plugin.integration.engine_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.vllm_api.requests.adapter import adapter_digest


class FrontEndCalls:
    """Makes the calls, and knows the adapters that they have loaded.

    Each front end, and each start of one, counts its adapters from 1. In the fleet, whose engines take adapters with
    equal ids for the same one, they have other ids.
    """

    def __init__(self, calls: UtilityCallClient) -> None:
        self._calls = calls
        self._adapters: dict[int, int] = {}

    async def make(self, method: str, args: Sequence[Any]) -> Any:
        """Make a call; returns what one engine would return. Raises whatever the call raises."""
        match method, args:
            case "add_lora", [fields]:
                return await self._add_adapter(convert(fields, LoRARequest))
            case "remove_lora", [int(own_id)] if own_id in self._adapters:
                removed = await self._calls.remove_lora_async(self._adapters[own_id])
                self._adapters.pop(own_id, None)
                return removed
            case "collective_rpc", _:
                return await self._calls.collective_rpc_async(*args)
        return await self._calls.call_utility_async(method, *args)

    def use_fleet_adapter(self, request: Any) -> None:
        """Name the adapter of an `EngineCoreRequest` as the fleet does. Raises StageInputError if it is not loaded."""
        adapter = request.lora_request
        if adapter is None:
            return
        fleet_id = self._adapters.get(adapter.lora_int_id)
        if fleet_id is None:
            raise StageInputError(f"The LoRA adapter {adapter.lora_name!r} is not loaded.")
        request.lora_request = replace(adapter, lora_int_id=fleet_id)

    async def _add_adapter(self, adapter: LoRARequest) -> Any:
        digest = await asyncio.to_thread(adapter_digest, adapter.lora_path)
        fleet_id = adapter_id(adapter.lora_name, adapter.lora_path, digest)
        added = await self._calls.add_lora_async(replace(adapter, lora_int_id=fleet_id))
        self._adapters[adapter.lora_int_id] = fleet_id
        return added
