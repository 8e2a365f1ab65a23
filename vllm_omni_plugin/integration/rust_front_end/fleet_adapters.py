"""The LoRA adapters of the fleet, and what the running front end must still load or unload to have them."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace
from vllm.lora.request import LoRARequest

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.integration.core_client.server_state_sync import adapter_id
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_digest


class FleetAdapters:
    """Loads and unloads the front end's adapters in the fleet, and knows those of the fleet by their names.

    Each start of the front end counts its adapters from 1. In the fleet, whose engines take adapters with equal ids for
    the same one, they have other ids. An adapter that the fleet has already is not loaded again.

    Lives on the orchestrator's loop. The attributes are replaced as a whole, so any thread may read them.

    Args:
        changed: called after each change of the attributes. It must complete the future, if there is one, when the
            front end has the adapters of the fleet: `RustFrontEnd.adapters_changed`, which makes it load them.

    Attributes:
        in_fleet: the adapters that requests can name, by name.
        missing: those of them that the front end does not have.
        surplus: names of adapters that the front end has, and the fleet has not.
    """

    def __init__(self, calls: UtilityCallClient, changed: Callable[["Future[None] | None"], None]) -> None:
        self._calls = calls
        self._changed = changed
        # The ids of the running front end by name; names with a call in progress, and the last of their loads.
        self._loaded: dict[str, int] = {}
        self._changing: list[str] = []
        self._last_loads: dict[str, int] = {}
        self.in_fleet: Mapping[str, Adapter] = {}
        self.missing: tuple[Adapter, ...] = ()
        self.surplus: frozenset[str] = frozenset()

    def front_end_starts(self) -> None:
        self._loaded = {}
        self.refresh()

    def refresh(self, applied: "Future[None] | None" = None) -> None:
        """Compare with the fleet: which adapters the front end lacks, and which it has that are gone."""
        self.in_fleet = self._calls.shared_adapters()
        known = {*self._loaded, *self._changing}
        self.missing = tuple(adapter for name, adapter in self.in_fleet.items() if name not in known)
        self.surplus = frozenset(self._loaded) - {*self.in_fleet, *self._changing}
        self._changed(applied)

    def use_in(self, request: Any) -> None:
        """Name the adapter of an `EngineCoreRequest` that has one as the fleet does.

        Raises StageInputError if it is not loaded.
        """
        adapter = request.lora_request
        if (shared := self.in_fleet.get(adapter.lora_name)) is None:
            raise StageInputError(f"The LoRA adapter {adapter.lora_name!r} is not loaded.")
        request.lora_request = replace(adapter, lora_int_id=shared.lora_int_id, lora_path=shared.lora_path)

    async def add(self, adapter: LoRARequest) -> Any:
        """Load an adapter for the front end; returns and raises what the call to the fleet does."""
        loaded, name = self._loaded, adapter.lora_name
        self._last_loads[name] = adapter.lora_int_id
        with self._change(name):
            shared = self._calls.shared_adapters().get(name)
            added: Any = True
            if shared is None or adapter.load_inplace or not await _is_same_folder(shared, adapter):
                digest = await asyncio.to_thread(adapter_digest, adapter.lora_path)
                fleet_id = adapter_id(name, adapter.lora_path, digest)
                added = await self._calls.add_lora_async(replace(adapter, lora_int_id=fleet_id))
                if added and shared is not None and shared.lora_int_id != fleet_id:
                    await self._calls.forget_lora_async(shared.lora_int_id)
            # It forgets a load whose client leaves, and has another id for the next, which may end before.
            if added and self._last_loads[name] == adapter.lora_int_id:
                loaded[name] = adapter.lora_int_id
            return added

    async def remove(self, own_id: int) -> Any:
        """Unload an adapter of the front end; returns and raises what the call to the fleet does.

        One that is not loaded is gone: the front end keeps an adapter whose unloading a client has not awaited.
        """
        loaded = self._loaded
        name = next((name for name, each in loaded.items() if each == own_id), None)
        if name is None:
            return True
        with self._change(name):
            shared = self._calls.shared_adapters().get(name)
            # Another head may have unloaded it.
            removed = shared is None or await self._calls.remove_lora_async(shared.lora_int_id)
            if removed and loaded.get(name) == own_id:
                del loaded[name]
            return removed

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """While the front end itself loads or unloads an adapter, it is not told to do it."""
        self._changing.append(name)
        try:
            yield
        finally:
            self._changing.remove(name)
            if name not in self._changing:
                self._last_loads.pop(name, None)
            self.refresh()


async def _is_same_folder(shared: Adapter, adapter: LoRARequest) -> bool:
    """Whether the paths are equal, apart from links, which the front end resolves in those that it is given."""
    one, other = [await asyncio.to_thread(os.path.realpath, path) for path in (shared.lora_path, adapter.lora_path)]
    return one == other
