"""Base class of fleets whose replicas are played by the test."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, Self

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.links import FakeLink, answer_calls
from vllm_omni_plugin.orchestrator import FleetControl, Orchestrator, PoolMember
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    CallReplicas,
    ManageReplica,
    SubmitRequest,
)
from vllm_omni_plugin.replicas.links.engine_client import EngineClient


class PlayedFleet:
    """An orchestrator that runs within an asynchronous context manager. `remote` stands for `RemoteReplicas`."""

    orchestrator: Orchestrator
    links: Mapping[Any, FakeLink]
    remote: Any = None
    exchange: WorkExchange | None = None

    @cached_property
    def fleet_calls(self) -> FleetCalls:
        return FleetCalls(self.orchestrator)

    async def __aenter__(self) -> Self:
        control = FleetControl(self.orchestrator, self.fleet_calls, self.remote, self.exchange)
        self._running = asyncio.create_task(control.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.orchestrator.close_queues()
        await self._running

    def serve(self, member: PoolMember, link: Any, api: Any, ready_response: bytes) -> None:
        client = EngineClient(
            link,
            api,
            member.name,
            partial(self.orchestrator.outputs_received, member),
            partial(self._on_dead, member),
        )
        client.start()
        self.orchestrator.replica_serves(member, client, link.input_addr, link.output_addr, ready_response)

    async def hand_over(self, message: SubmitRequest | AbortRequests) -> None:
        """Send a message to the orchestrator; returns when it is handled."""
        queue = self.orchestrator.front_end.request_async_queue
        queue.put(message)
        # A batch is read and handled in one step of the loop, so an empty queue means that it was handled.
        await eventually(lambda: len(queue) == 0, "the reading of a message")

    async def abort(self, *request_ids: str, whole: bool = False) -> None:
        await self.hand_over(AbortRequests(request_ids, whole))

    def ask(self, method: str, *args: Any, stages: tuple[int, ...] | None = None) -> Future[list[Any]]:
        """Call all replicas of all stages, or of some, as an operator does."""
        reply: Future[list[Any]] = Future()
        self.orchestrator.rpc_async_queue.put(CallReplicas(method, args, reply, stages))
        return reply

    async def call(self, method: str, *args: Any, stages: tuple[int, ...] | None = None) -> list[Any]:
        """As `ask`; returns the answers."""
        async with asyncio.timeout(10):
            return await asyncio.wrap_future(self.ask(method, *args, stages=stages))

    def answer_with(self, on_call: Callable[[FakeLink, int, str, list[Any]], None] | None) -> None:
        """Set `on_call` of all links."""
        for link in self.links.values():
            link.on_call = on_call

    async def replayed(self, stage_id: int = 0, link: FakeLink | None = None) -> list[tuple[str, list[Any]]]:
        """The calls that a replica receives when it attaches to a stage; by default it accepts every call."""
        if link is None:
            link = FakeLink("joiner")
            link.on_call = answer_calls
        client = EngineClient(link, FakeEngineApi(), "joiner", lambda outputs: None, lambda reason: None)
        client.start()
        async with asyncio.timeout(10):
            member = PoolMember(0, stage_id)
            await self.orchestrator.stage_calls[stage_id].bring_up_to_date(member, client, False)
        return [(method, args) for _, method, args in link.calls]

    async def manage(self, action: Any, replica_id: int, stage_id: int = 0) -> None:
        """Drain, resume or remove a replica, as an operator does."""
        reply: Future[None] = Future()
        self.orchestrator.rpc_async_queue.put(ManageReplica(action, stage_id, replica_id, reply))
        async with asyncio.timeout(10):
            await asyncio.wrap_future(reply)

    def _on_dead(self, member: PoolMember, reason: str) -> None:
        if member.client is not None:
            self.orchestrator.replica_lost(member, reason)
