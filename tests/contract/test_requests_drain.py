"""What vLLM itself does between a fleet and its clients: it waits for requests to drain, and sends chunks."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, RequestFailed, SubmitRequest

from .test_engine_client import registered


class Drain:
    """vLLM's own waiting for requests to drain, with a clock of the test's, and what happens between two looks."""

    def __init__(self, client: FleetClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._server: Any = object.__new__(AsyncLLM)
        self._server.engine_core = client
        self._events: list[Callable[[], Awaitable[None]]] = []
        monkeypatch.setattr(async_llm, "time", SimpleNamespace(time=lambda: self.now))
        monkeypatch.setattr(async_llm, "asyncio", SimpleNamespace(sleep=self._sleep))

    async def wait(self, timeout: int, *events: Callable[[], Awaitable[None]]) -> None:
        self._events += events
        await self._server.wait_for_requests_to_drain(timeout)
        assert self._events == []

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._events:
            await self._events.pop(0)()


async def test_requests_have_drained_when_all_that_were_submitted_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeFleet(replicas=2) as fleet:
        client = FleetClient(IdleFleet(fleet.orchestrator), SimpleNamespace(), [])

        async def end(request_id: str) -> None:
            # Taken by now, if it was handed over a moment before the first look.
            await eventually(lambda: request_id in fleet.orchestrator.request_states)
            fleet.say(request_id, 1, finish_reason="stop")

        drain = Drain(client, monkeypatch)
        await drain.wait(300)
        assert drain.now == 0
        for request_id in "ab":
            await client.add_request_async(FakeRequest(request_id))
        await drain.wait(300, partial(end, "a"), partial(end, "b"))
        assert drain.now == 2
        await client.add_request_async(FakeRequest("c"))
        with pytest.raises(TimeoutError, match="after 5 seconds"):
            await drain.wait(5)
        client.shutdown()


async def test_a_chunk_sent_before_its_session_is_known_to_have_failed_is_aborted(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    processor, queue = registered(client, "session")
    orchestrator.front_end.output_async_queue.put(RequestFailed("session", ReplicaError("The replica is lost.")))
    await client.add_request_async(FakeRequest("session", resumable=True))
    reading = asyncio.create_task(client.get_output_async())
    with pytest.raises(GracefulHTTPError, match="The replica is lost"):
        await queue.get()
    chunk, abort = await orchestrator.front_end.request_async_queue.get_batch()
    assert isinstance(chunk, SubmitRequest)
    assert abort == AbortRequests(("session",), whole=True)
    assert not processor.has_unfinished_requests()
    reading.cancel()


async def test_a_session_that_has_failed_sends_no_further_chunk(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    _, queue = registered(client, "session")
    may_send = asyncio.Event()

    async def send_chunk() -> None:
        await may_send.wait()
        await client.add_request_async(FakeRequest("session", resumable=True))

    # As `AsyncLLM` sends the chunks of a session.
    sending = queue._input_stream_task = asyncio.create_task(send_chunk())
    orchestrator.front_end.output_async_queue.put(RequestFailed("session", ReplicaError("The replica is lost.")))
    reading = asyncio.create_task(client.get_output_async())
    with pytest.raises(GracefulHTTPError, match="The replica is lost"):
        await queue.get()
    may_send.set()
    await asyncio.wait([sending])
    assert await orchestrator.front_end.request_async_queue.get_batch() == [AbortRequests(("session",), whole=True)]
    reading.cancel()
