"""What the front end must know of other heads' operator calls."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

_APPLY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineStateUpdate:
    """Another head has (un)loaded adapters, or has changed how deep the engines sleep.

    A loaded adapter may replace one of the same name. `sleep_level` is 0 while weights are in memory; None: unchanged.
    `applied` is done when the front end has applied the update.
    """

    loaded: tuple[Adapter, ...]
    unloaded: tuple[int, ...]
    sleep_level: int | None
    applied: "Future[None]"


@dataclass(frozen=True, slots=True)
class AbortedElsewhere:
    """An operator has aborted requests through another head: by their clients' ids, or all without ids."""

    request_ids: Sequence[str]
    applied: "Future[None]"


async def notify(put: Callable[[Any], None], update: EngineStateUpdate | AbortedElsewhere | None) -> None:
    """Send an update to the front end, see `FrontEnd.give`; returns when it is applied, or after 10 seconds."""
    if update is not None:
        put(update)
        with suppress(TimeoutError):
            async with asyncio.timeout(_APPLY_TIMEOUT_S):
                await asyncio.wrap_future(update.applied)


def complete(applied: "Future[None]") -> None:
    """The front end has applied an update; nobody waits for it any more if it took too long."""
    if applied.set_running_or_notify_cancel():
        applied.set_result(None)
