"""What operators told other heads, in this head's server."""

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from random import Random, SystemRandom
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import EngineStateUpdate

_ID_BITS = 53
"""Ids pass through JSON."""


class ServerStateSync:
    """Keeps vLLM's registry of adapters and its metrics in step with other heads. Lives on AsyncLLM's loop.

    Attributes:
        loggers: vLLM's `StatLoggerManager`; None: nobody counts.
    """

    def __init__(self) -> None:
        self.loggers: Any = None
        self._requests: dict[str, LoRARequest] = {}

    def bind(self, models: Any) -> None:
        """Take vLLM's `OpenAIServingModels`, before it loads adapters, for the registry from now on."""
        models.lora_requests.update(self._requests)
        self._requests = models.lora_requests
        models.lora_id_counter = AdapterIdCounter()

    def missing(self, modules: Iterable[Any]) -> Iterator[Any]:
        """Those modules of the command line under whose names the fleet has loaded nothing when their turn comes.

        Other servers load the same ones at the same time, and vLLM refuses names that are there. Given twice on one
        command line, a name is for vLLM to refuse.
        """
        own: set[str] = set()
        for module in modules:
            if module.name in own or module.name not in self._requests:
                own.add(module.name)
                yield module

    def apply(self, news: EngineStateUpdate) -> None:
        """Another head was told something."""
        gone = {name for name, request in self._requests.items() if request.lora_int_id in news.unloaded}
        for name in gone:
            del self._requests[name]
        for adapter in news.loaded:
            self._requests[adapter.lora_name] = msgspec.convert(msgspec.to_builtins(adapter), LoRARequest)
        if news.sleep_level is not None and self.loggers is not None:
            self.loggers.record_sleep_state(int(news.sleep_level > 0), news.sleep_level)
        if news.applied.set_running_or_notify_cancel():
            news.applied.set_result(None)


class AdapterIdCounter:
    """Stands in for the counter of vLLM's registry, in ids that no other server gives to another adapter.

    vLLM counts from 1 in each server, and an engine takes adapters of one id for the same.

    Args:
        modules: name, path and digest of the adapters that are loaded first, which have the same ids in all servers.
            With the digest, an engine that has outlived a head does not take what it loaded then for other files.
        random: ids of those that follow.
    """

    def __init__(self, modules: Iterable[tuple[str, str, str]] = (), random: Random | None = None) -> None:
        self._first = deque(_id_of(*module) for module in modules)
        self._random = random or SystemRandom()

    def inc(self, num: int = 1) -> int:
        """The id of the next adapter."""
        return self._first.popleft() if self._first else self._random.randrange(1, 1 << _ID_BITS)


def _id_of(name: str, path: str, digest: str) -> int:
    hashed = blake2b(f"{name}\0{path}\0{digest}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed) % ((1 << _ID_BITS) - 1) + 1
