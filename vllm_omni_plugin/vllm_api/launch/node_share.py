"""What the engines of one process share: cores, and perhaps devices."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field


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
    """The place of the engines of one launcher among all engines of this process, which share the turns."""

    first_engine: int = 0
    engines: int = 1
    turns: DeviceTurns = field(default_factory=DeviceTurns)
