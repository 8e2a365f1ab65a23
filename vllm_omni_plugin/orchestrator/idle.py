"""Waiting until nothing is in flight on a replica."""

import asyncio

from vllm_omni_plugin.orchestrator.pool_member import PoolMember


class IdleWaits:
    """Who waits for which replica to become idle. Lives on the orchestrator's loop."""

    def __init__(self) -> None:
        self._waiters: dict[PoolMember, asyncio.Future[None]] = {}

    def wait_for(self, member: PoolMember) -> "asyncio.Future[None]":
        """Done as soon as nothing is in flight on the replica."""
        waiter = self._waiters.get(member)
        if waiter is None or waiter.done():
            waiter = self._waiters[member] = asyncio.get_running_loop().create_future()
        self.tell_if_idle(member)
        return waiter

    def tell_if_idle(self, member: PoolMember) -> None:
        """Something has left the replica."""
        if self._waiters and not member.in_flight:
            waiter = self._waiters.pop(member, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
