"""What comes back of a call, whatever loop, client or order there is."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tests.contract.pipeline_http.app import spoken
from vllm_omni_plugin.integration.core_client.pipeline_calls import ActivePipelineCall, register_request
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent

ENDED = PipelineCallEnded(None)


def wanted(put: Callable[[StageEvent | PipelineCallEnded], None]) -> PipelineCall:
    return PipelineCall(("text",), put)


async def requests(*ids: str, then: Callable[[], Any] = lambda: None) -> AsyncGenerator[str, None]:
    """Makes requests, one for each part of its answer."""
    for request_id in ids:
        register_request(request_id)
        yield request_id
    then()


async def test_it_ends_when_the_answer_and_all_requests_have() -> None:
    aborted: list[Any] = []
    running = ActivePipelineCall(wanted, aborted.append)

    def end() -> None:
        running.call.put(ENDED)
        running.call.put(spoken("late"))
        running.call.put(ENDED)

    async with asyncio.timeout(10):
        items = [item async for item in running.run(requests("a", "b", then=end))]
    assert items == ["a", "b", ENDED, spoken("late"), ENDED]
    assert aborted == []


async def test_an_error_of_the_answer_is_raised_also_if_its_last_request_ends_in_the_same_moment() -> None:
    running = ActivePipelineCall(wanted, list)
    loop = asyncio.get_running_loop()
    failing = loop.create_future()

    async def fails() -> AsyncGenerator[str, None]:
        register_request("a")
        yield "a"
        await failing

    def fail_and_end() -> None:
        # Both in the next turn of the loop.
        loop.call_soon(failing.set_exception, ValueError("vLLM says no"))
        running.call.put(ENDED)

    async def call() -> None:
        async for item in running.run(fails()):
            if item == "a":
                loop.call_soon(fail_and_end)

    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="vLLM says no"):
            await call()
