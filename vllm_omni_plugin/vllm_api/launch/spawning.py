"""Spawning of processes: one lock for all, exit codes, socket files, and the devices that engines share."""

import asyncio
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

SPAWN_LOCK = threading.Lock()
"""Held while a process is spawned, but not while it loads. During a spawn, vLLM changes state of the whole process and
restores it: environment variables, torch's thread count, with `--numa-bind` the program that multiprocessing starts. A
second spawn at the same time would inherit that state, or restore the wrong one."""


EXIT_TIMEOUT_S = 15.0
"""Seconds for an idle engine to exit. vLLM's 5 s are too short where several engines share few cores."""


def describe_exit(code: int | None) -> str:
    """How a process ended, as the end of a sentence; `code` is negative for a signal, None for a running process."""
    if code is None:
        return "has not ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def remove_ipc_files(*addresses: str) -> None:
    """Remove the socket files of ipc addresses that are no longer bound; libzmq leaves them."""
    for address in addresses:
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


class DeviceTurns:
    """Makes engines that share a device start in turns, because each measures the free memory. For one event loop."""

    def __init__(self) -> None:
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def turn(self, devices: Iterable[int]) -> AsyncIterator[None]:
        """Enter when no other engine is starting on any of these devices."""
        async with AsyncExitStack() as held:
            # In the same order everywhere, so that nobody waits in a circle.
            for device in sorted(set(devices)):
                await held.enter_async_context(self._locks[device])
            yield


@dataclass(frozen=True)
class NodeShare:
    """The place of the engines of one launcher among all `engines` of this process, which share the turns."""

    first_engine: int = 0
    engines: int = 1
    turns: DeviceTurns = field(default_factory=DeviceTurns)
