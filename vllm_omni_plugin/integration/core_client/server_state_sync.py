"""Applies operator calls made through other heads to this head's server."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from random import SystemRandom
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from vllm_omni_plugin.orchestrator.fleet_state.server_updates import EngineStateUpdate, complete

_ID_BITS = 53
"""Ids pass through JSON."""


class ServerStateSync:
    """Updates vLLM's LoRA registry and sleep metrics after calls through other heads. Used on AsyncLLM's loop."""

    def __init__(self) -> None:
        self.loggers: Any = None
        self._requests: dict[str, LoRARequest] = {}

    def bind(self, models: Any) -> None:
        """Use vLLM's `OpenAIServingModels`, which has not loaded adapters yet, as the registry."""
        models.lora_requests.update(self._requests)
        self._requests = models.lora_requests
        models.lora_id_counter = AdapterIdCounter()

    def missing(self, modules: Iterable[Any]) -> Iterator[Any]:
        """The `--lora-modules` whose names are not registered when they are reached: other servers load them, too.

        A name that is given twice is yielded twice, so that vLLM refuses it.
        """
        own: set[str] = set()
        for module in modules:
            if module.name in own or module.name not in self._requests:
                own.add(module.name)
                yield module

    def forget(self, lora_ids: Collection[int]) -> None:
        for name in [name for name, request in self._requests.items() if request.lora_int_id in lora_ids]:
            del self._requests[name]

    def apply(self, update: EngineStateUpdate) -> None:
        self.forget(update.unloaded)
        for adapter in update.loaded:
            self._requests[adapter.lora_name] = msgspec.convert(msgspec.to_builtins(adapter), LoRARequest)
        if update.sleep_level is not None and self.loggers is not None:
            self.loggers.record_sleep_state(int(update.sleep_level > 0), update.sleep_level)
        complete(update.applied)


class AdapterIdCounter:
    """Replaces the counter of vLLM's registry. Different adapters get different ids, also in different servers.

    vLLM counts from 1 in each server, and an engine treats adapters with equal ids as the same adapter. The ids of the
    first `modules` (name, path, digest) are hashes, equal in all servers; with the digest, an engine that outlives a
    head does not confuse changed files with those it has loaded. Later ids are random.
    """

    def __init__(self, modules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._first = deque(adapter_id(*module) for module in modules)

    def inc(self, num: int = 1) -> int:
        return self._first.popleft() if self._first else SystemRandom().randrange(1, 1 << _ID_BITS)


def adapter_id(name: str, path: str, digest: str) -> int:
    """An id that is the same in all servers that load an adapter from these files, and no other adapter has."""
    hashed = blake2b(f"{name}\0{path}\0{digest}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed) % ((1 << _ID_BITS) - 1) + 1
