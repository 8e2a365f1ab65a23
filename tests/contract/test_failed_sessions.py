"""A streaming-input session that has failed leaves nothing at engines, whatever chunk its client sends meanwhile."""

import asyncio

import pytest
from vllm.exceptions import GracefulHTTPError

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, RequestFailed, SubmitRequest

from .test_engine_client import registered


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
