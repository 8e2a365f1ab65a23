"""Requests during a shutdown: those that can finish do, and all get a response."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from vllm_omni_plugin.integration.core_client.graceful_shutdown import GracefulShutdown
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent


class FakeProcessor:
    """The requests that AsyncLLM's `OutputProcessor` knows."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def abort_requests(self, request_ids: Sequence[str], internal: bool) -> None:
        assert internal
        for request_id in request_ids:
            del self.request_states[request_id]


class Finished:
    """A fleet whose replicas have finished everything at once, with so many seconds left."""

    def __init__(self, left: float) -> None:
        self._left = left
        self.asked: list[float] = []

    def __call__(self, timeout: float) -> float:
        self.asked.append(timeout)
        return self._left


@pytest.fixture
def processor() -> FakeProcessor:
    return FakeProcessor()


@pytest.fixture
def shutdown(processor: FakeProcessor) -> GracefulShutdown:
    shutdown = GracefulShutdown()
    shutdown.bind(processor)
    return shutdown


def submit(shutdown: GracefulShutdown, processor: FakeProcessor, *, pooling: bool = False, call: Any = None) -> bool:
    """Request "a", as AsyncLLM does it, whose processor knows it first."""
    said: list[Exception] = []
    queue = SimpleNamespace(put=said.append, said=said)
    processor.request_states["a"] = SimpleNamespace(detokenizer=None if pooling else "one", queue=queue)
    shutdown.outputs_processed()
    if shutdown.ending:
        shutdown.refuse("a", call)
    return not shutdown.ending


async def test_a_server_made_on_its_loop_waits_before_its_first_request_has_reached_an_engine() -> None:
    shutdown = GracefulShutdown()
    shutdown.bind(FakeProcessor())
    fleet = Finished(left=0.0)
    await asyncio.to_thread(shutdown.wait_for_requests, fleet, 60.0)
    assert fleet.asked == [60.0]


@pytest.mark.parametrize("timeout", [None, 0.0])
async def test_without_time_or_on_the_loop_there_is_no_wait(
    shutdown: GracefulShutdown, processor: FakeProcessor, timeout: float | None
) -> None:
    assert submit(shutdown, processor)
    fleet = Finished(left=50.0)
    assert await asyncio.to_thread(shutdown.wait_for_requests, fleet, timeout) == timeout
    assert shutdown.wait_for_requests(fleet, 60.0) == 60, "this is the loop that requests need"
    assert fleet.asked == []


async def test_a_refused_call_of_a_pipeline_ends(shutdown: GracefulShutdown, processor: FakeProcessor) -> None:
    events: list[StageEvent | PipelineCallEnded] = []
    await asyncio.to_thread(shutdown.wait_for_requests, Finished(left=0.0), 0.0)
    assert not submit(shutdown, processor, call=PipelineCall(("audio",), events.append))
    (ended,) = events
    assert isinstance(ended, PipelineCallEnded)
    assert "shutting down" in str(ended.error)


async def test_an_answer_without_a_finish_reason_ends_with_an_error(
    shutdown: GracefulShutdown, processor: FakeProcessor
) -> None:
    assert submit(shutdown, processor, pooling=True)
    queue = processor.request_states["a"].queue
    await asyncio.to_thread(shutdown.abort_all)
    await asyncio.sleep(0)
    (error,) = queue.said
    assert isinstance(error, GracefulHTTPError)
    assert "shutting down" in str(error)


async def test_waiting_for_the_shutdown_ends_when_it_begins(shutdown: GracefulShutdown) -> None:
    waiting = asyncio.create_task(shutdown.wait_until_ending())
    await asyncio.sleep(0)
    assert not shutdown.ending
    await asyncio.to_thread(shutdown.wait_for_requests, Finished(left=0.0), 0.0)
    assert shutdown.ending
    await asyncio.wait_for(waiting, 10)
