"""Calls that the front end makes to its engine, made to the fleet."""

from collections.abc import Sequence
from typing import Any

from msgspec import convert
from vllm.lora.request import LoRARequest

from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.rust_front_end.fleet_adapters import FleetAdapters


class FrontEndCalls:
    """Makes the calls of one start of the front end."""

    def __init__(self, calls: UtilityCallClient, adapters: FleetAdapters) -> None:
        self._calls = calls
        self._adapters = adapters

    async def make(self, method: str, args: Sequence[Any]) -> Any:
        """Make a call; returns what one engine would return. Raises whatever the call raises."""
        match method, args:
            case "add_lora", [fields]:
                return await self._adapters.add(convert(fields, LoRARequest))
            case "remove_lora", [int(own_id)]:
                return await self._adapters.remove(own_id)
            case "collective_rpc", _:
                return await self._calls.collective_rpc_async(*args)
        return await self._calls.call_utility_async(method, *args)
