"""What fleets whose replicas the test plays have in common."""

import asyncio
from functools import partial
from typing import Any, Self

from tests.fakes.conditions import eventually
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, SubmitRequest
from vllm_omni_plugin.replicas.client.stage_client import StageClient


class PlayedFleet:
    """An orchestrator that runs within an asynchronous context manager."""

    orchestrator: Orchestrator

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.orchestrator.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.orchestrator.close_queues()
        await self._running

    def serve(self, member: PoolMember, link: Any, api: Any, ready_response: bytes) -> None:
        """The replica serves from now on, over this link."""
        client = StageClient(
            link,
            api,
            member.name,
            partial(self.orchestrator.outputs_received, member),
            partial(self._on_dead, member),
        )
        client.start()
        self.orchestrator.replica_serves(member, client, link.input_addr, link.output_addr, ready_response)

    async def hand_over(self, message: SubmitRequest | AbortRequests) -> None:
        """Give the orchestrator a message; returns when it has dealt with it."""
        queue = self.orchestrator.request_async_queue
        queue.force_put(message)
        # A batch is taken and dealt with in one step of the loop, so an empty queue means that it has been.
        await eventually(lambda: len(queue) == 0, "the taking of a message")

    def _on_dead(self, member: PoolMember, reason: str) -> None:
        if member.client is not None:
            self.orchestrator.replica_lost(member, reason)
