"""What comes back of a call, whatever loop, client or order there is."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from tests.contract.pipeline_http.app import spoken
from vllm_omni_plugin.integration.engine_client.pipeline_calls import RunningCall, submitted
from vllm_omni_plugin.orchestrator.requests.pipeline_call import CallEnded, PipelineCall, StageEvent

ENDED = CallEnded(None)


def wanted(put: Callable[[StageEvent | CallEnded], None]) -> PipelineCall:
    return PipelineCall(("text",), put)


async def requests(*ids: str, then: Callable[[], Any] = lambda: None) -> AsyncGenerator[str, None]:
    """Makes requests, one for each part of its answer."""
    for request_id in ids:
        submitted(request_id)
        yield request_id
    then()


async def test_it_ends_when_the_answer_and_all_requests_have() -> None:
    aborted: list[Any] = []
    running = RunningCall(wanted, aborted.append)

    def end() -> None:
        running.call.put(ENDED)
        running.call.put(spoken("late"))
        running.call.put(ENDED)

    async with asyncio.timeout(10):
        items = [item async for item in running.run(requests("a", "b", then=end))]
    assert items == ["a", "b", ENDED, spoken("late"), ENDED]
    assert aborted == []


def test_an_event_for_a_loop_that_has_ended_is_dropped() -> None:
    async def begin() -> RunningCall:
        return RunningCall(wanted, list)

    asyncio.run(begin()).call.put(ENDED)
