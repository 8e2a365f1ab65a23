"""Requests that AsyncLLM hands over carry a list of dispatches where somebody will read it, and none elsewhere."""

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine.output_processor import OutputProcessor

from tests.admin.asgi import Client
from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.admin.replica_header import ReplicaHeaderMiddleware
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest


async def submitted(client: FleetClient) -> list[SubmitRequest]:
    batch = await client.orchestrator.request_async_queue.get_batch()
    return [message for message in batch if isinstance(message, SubmitRequest)]


async def test_a_request_outside_of_http_has_none(client: FleetClient) -> None:
    await client.add_request_async(FakeRequest("a"))
    assert [message.dispatches for message in await submitted(client)] == [None]


async def test_a_traced_request_has_one_wherever_it_comes_from(client: FleetClient) -> None:
    client.bind(OutputProcessor(None, log_stats=True, tracing_enabled=True), None)
    await client.add_request_async(FakeRequest("a"))
    assert [message.dispatches for message in await submitted(client)] == [[]]


async def test_all_prompts_of_an_answer_are_in_its_header_as_vllm_merges_them(client: FleetClient) -> None:
    async def generate(request_id: str) -> Any:
        await client.add_request_async(FakeRequest(request_id))
        yield request_id

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        merged = merge_async_iterators(generate("a"), generate("b"))
        assert {item async for _, item in merged} == {"a", "b"}
        for message in await submitted(client):
            assert message.dispatches is not None
            message.dispatches.append((f"0.{message.request.request_id}", Decision(0, "least-load")))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    answer = Client(
        ReplicaHeaderMiddleware(app), {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    )
    async with asyncio.timeout(10):
        await answer.request
    assert answer.headers == {"x-omni-replica": "0.a, 0.b"}
