"""Several heads with one replica server: an operator call reaches the engine once."""

import asyncio
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.sim.protocol.whole_heads import WholeHead, open_site
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallReplicas
from vllm_omni_plugin.replicas.links.engine_client import EngineClient


async def call(head: WholeHead, method: str, *args: Any) -> list[Any]:
    reply: Future[list[Any]] = Future()
    head.orchestrator.rpc_async_queue.put(CallReplicas(method, args, reply))
    async with asyncio.timeout(10):
        return await asyncio.wrap_future(reply)


async def test_an_engine_gets_each_call_once_and_stays_paused_without_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    own_call = EngineClient.call

    async def noted(client: EngineClient, method: str, *args: Any) -> Any:
        if method in ("pause_scheduler", "resume_scheduler"):
            told.append(method)
        return await own_call(client, method, *args)

    monkeypatch.setattr(EngineClient, "call", noted)
    async with open_site() as new_head:
        async with AsyncExitStack() as stack:
            first, second = [await stack.enter_async_context(new_head()) for _ in range(2)]
            await call(first, "pause_scheduler", "keep", True)
            late = await stack.enter_async_context(new_head())
            assert told == ["pause_scheduler"]
            assert await call(late, "is_scheduler_paused") == [True]
            await call(second, "resume_scheduler")
            await call(late, "pause_scheduler", "keep", True)
            assert told == ["pause_scheduler", "resume_scheduler", "pause_scheduler"]
        told.clear()
        async with new_head() as next_head:
            await eventually(lambda: next_head.fleet_calls.session.refusal is None)
            assert await call(next_head, "is_scheduler_paused") == [True]
            assert (told, next_head.member.cordons) == ([], {"asleep"})
            await call(next_head, "resume_scheduler")
            assert await call(next_head, "is_scheduler_paused") == [False]
            assert (told, len(next_head.pool.serving)) == (["resume_scheduler"], 1)
