"""Where requests wait while the fleet cannot serve: bounded in number and time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from vllm_omni_plugin.errors import SHUTTING_DOWN, NoReplicaError
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator

MAX_WAITING = 1024
"""Requests that may wait at once; each keeps a connection and its body. More are refused at once."""


class Ending(Protocol):
    """When the server is told to end; `integration.last_requests.LastRequests` in service."""

    ending: bool

    async def until_ending(self) -> None: ...


class WaitingRoom:
    """Lives on the HTTP server's event loop.

    Args:
        orchestrator: whose `can_serve` is waited for.
        until_serving: returns once that holds, woken by the orchestrator.
        replica_wait: seconds that one request may wait; 0 refuses at once.
        last_requests: says when to refuse all.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        until_serving: Callable[[], Coroutine[Any, Any, None]],
        replica_wait: float,
        last_requests: Ending,
    ) -> None:
        self._orchestrator = orchestrator
        self._until_serving = until_serving
        self._replica_wait = replica_wait
        self._last_requests = last_requests

    @property
    def is_needed(self) -> bool:
        """Whether a request that comes now has to wait, or is refused."""
        return self._last_requests.ending or not self._orchestrator.can_serve

    async def wait(self, disconnected: Callable[[], Coroutine[Any, Any, None]], has_key: bool) -> bool:
        """Wait until the fleet can serve or the client is gone.

        Args:
            disconnected: returns when the client is gone; cancelled when that no longer matters.
            has_key: whether the request carries a valid API key, or the server has none; without one it may not wait.

        Returns:
            Whether the client is still there.

        Raises:
            NoReplicaError: the time is over, the room is full, the server ends, or the request may not wait.
        """
        if self._last_requests.ending:
            raise self._ending()
        if not has_key:
            raise self._refusal("a request without a valid API key does not wait")
        metrics = self._orchestrator.metrics
        if metrics.waiting >= MAX_WAITING:
            raise self._refusal(f"{MAX_WAITING} requests wait already")
        gone = asyncio.create_task(disconnected(), name="omni-disconnect")
        served = asyncio.create_task(self._until_serving(), name="omni-waiting")
        ending = asyncio.create_task(self._last_requests.until_ending(), name="omni-ending")
        metrics.waiting += 1
        try:
            await asyncio.wait({gone, served, ending}, timeout=self._replica_wait, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise self._ending()
            if not gone.done() and not served.done():
                raise self._refusal(f"waited {self._replica_wait:g} s")
            return not gone.done()
        finally:
            metrics.waiting -= 1
            gone.cancel()
            served.cancel()
            ending.cancel()
            await asyncio.gather(gone, served, ending, return_exceptions=True)

    def _ending(self) -> NoReplicaError:
        self._orchestrator.metrics.turned_away += 1
        return NoReplicaError(SHUTTING_DOWN)

    def _refusal(self, reason: str) -> NoReplicaError:
        self._orchestrator.metrics.turned_away += 1
        pools = self._orchestrator.needed_pools
        closed = next((pool for pool in pools if not pool.serving), pools[0])
        return NoReplicaError(f"{closed.unavailable()} ({reason})")
