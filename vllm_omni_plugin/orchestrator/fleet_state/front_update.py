"""What AsyncLLM's side is told of operators' calls that came through other heads."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter

_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True)
class FrontUpdate:
    """Another head has loaded or unloaded adapters, or put the engines to sleep.

    Attributes:
        loaded: adapters that can be asked for from now on, or under whose name there is another one now.
        unloaded: ids of those that cannot any more.
        sleep_level: how deep the engines sleep now, 0 while they have their weights; None: as before.
        applied: done when that holds here.
    """

    loaded: tuple[Adapter, ...]
    unloaded: tuple[int, ...]
    sleep_level: int | None
    applied: "Future[None]"


@dataclass(frozen=True, slots=True)
class FrontView:
    """What AsyncLLM's side knows of the engines at one moment."""

    adapters: dict[int, Adapter]
    sleep_level: int

    @classmethod
    def of(cls, states: Sequence[SharedState]) -> "FrontView":
        """The view of stages in these states; they sleep as deep as the first."""
        adapters = {adapter.lora_int_id: adapter for state in states for adapter in state.adapters}
        return cls(adapters, states[0].sleep_level)

    def difference(self, now: "FrontView") -> FrontUpdate | None:
        """What has to be told of a change from this view to another, None if there is nothing."""
        loaded = tuple(a for lora_id, a in now.adapters.items() if self.adapters.get(lora_id) != a)
        unloaded = tuple(self.adapters.keys() - now.adapters.keys())
        level = now.sleep_level if now.sleep_level != self.sleep_level else None
        return FrontUpdate(loaded, unloaded, level, Future()) if loaded or unloaded or level is not None else None


async def tell(tell_front: Callable[[Any], None], news: FrontUpdate | None) -> None:
    """Tell AsyncLLM's side; returns when it has applied that, or takes too long for that."""
    if news is not None:
        tell_front(news)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                await asyncio.wrap_future(news.applied)
