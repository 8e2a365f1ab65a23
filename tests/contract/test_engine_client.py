"""What AsyncLLM takes for granted of any engine client, asked of the fleet's."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, CallReplicas
from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi


def test_a_fleet_is_closed_once_with_the_time_its_requests_have(fleet: IdleFleet, client: FleetClient) -> None:
    client.shutdown(3.0)
    client.shutdown()
    assert fleet.closed_after == [3.0]
    assert client.resources.engine_dead


async def test_a_request_that_comes_too_late_is_not_sent_and_what_is_known_of_it_is_dropped(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    client.bind(OutputProcessor(None, log_stats=False), None)
    client.shutdown()
    await client.add_request_async(FakeRequest("late"))
    assert await orchestrator.request_async_queue.get_batch() == [AbortRequests(("late",), whole=True)]


async def test_the_reader_of_a_fleet_that_is_shut_down_is_told_of_no_fault(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    reader = asyncio.create_task(client.get_output_async())
    await asyncio.sleep(0)
    client.shutdown()
    orchestrator.close_queues()
    done, _ = await asyncio.wait({reader}, timeout=0.05)
    assert not done
    reader.cancel()


async def test_the_reader_of_a_fleet_that_failed_is_told_so(orchestrator: Orchestrator, client: FleetClient) -> None:
    orchestrator.close_queues()
    with pytest.raises(EngineDeadError):
        await client.get_output_async()
    assert client.resources.engine_dead


async def test_who_waits_for_a_fleet_goes_on_when_a_replica_serves(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.create_task(client.until_serving())
    await asyncio.sleep(0)
    Thread(target=orchestrator.serving_signal.tell).start()
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done, "a wake-up without a replica that serves ends no wait"
    monkeypatch.setattr(Orchestrator, "can_serve", True)
    Thread(target=orchestrator.serving_signal.tell).start()
    await asyncio.wait_for(waiting, 10)


async def test_one_who_waits_on_a_loop_that_ends_at_that_moment_keeps_nobody_else_waiting(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_on_a_loop_that_ends() -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            waiting = client.until_serving()
            # Ended from without, as a process does, it never leaves its place.
            loop.call_soon(waiting.send, None)
            loop.run_until_complete(asyncio.sleep(0))
            places.append(waiting)
        monkeypatch.setattr(loop, "is_closed", lambda: False)

    places: list[object] = []
    await asyncio.to_thread(wait_on_a_loop_that_ends)
    here = asyncio.create_task(client.until_serving())
    await asyncio.sleep(0)
    monkeypatch.setattr(Orchestrator, "can_serve", True)
    orchestrator.serving_signal.tell()
    await asyncio.wait_for(here, 10)


async def test_a_backlog_of_outputs_does_not_keep_the_loop_from_other_work(
    orchestrator: Orchestrator, fleet: IdleFleet
) -> None:
    now = 0.0
    client = FleetClient(fleet, SimpleNamespace(), [], clock=lambda: now)
    for engine_index in range(10):
        orchestrator.output_async_queue.force_put(EngineApi().idle_report(engine_index))
    taken: list[int] = []
    seen: list[int] = []

    async def take_all() -> None:
        nonlocal now
        while len(taken) < 10:
            taken.append((await client.get_output_async()).engine_index)
            now += 0.004

    async def other_work() -> None:
        while len(taken) < 10:
            seen.append(len(taken))
            await asyncio.sleep(0)

    await asyncio.gather(take_all(), other_work())
    client.shutdown()
    assert taken == list(range(10))
    # Between two turns outputs of 10 ms are taken, so that what they bring for one request is sent as one.
    assert seen == [0, 3, 6, 9]


async def test_a_head_whose_first_replica_is_lost_at_once_waits_for_the_next(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orchestrator, "can_serve", True)
    asking = asyncio.create_task(client.get_supported_tasks_async())
    (lost,) = await orchestrator.rpc_async_queue.get_batch()
    monkeypatch.setattr(Orchestrator, "can_serve", False)
    assert isinstance(lost, CallReplicas)
    lost.reply.set_exception(ReplicaError("replica 0 is gone"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asking), 0.05)
    monkeypatch.setattr(Orchestrator, "can_serve", True)
    orchestrator.serving_signal.tell()
    (taken,) = await orchestrator.rpc_async_queue.get_batch()
    assert isinstance(taken, CallReplicas)
    taken.reply.set_result([("generate",)])
    assert await asking == ("generate",)


async def test_a_replica_that_serves_and_cannot_say_what_it_does_is_an_error(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orchestrator, "can_serve", True)
    asking = asyncio.create_task(client.get_supported_tasks_async())
    (failing,) = await orchestrator.rpc_async_queue.get_batch()
    assert isinstance(failing, CallReplicas)
    failing.reply.set_exception(ReplicaError("it does not know"))
    with pytest.raises(ReplicaError, match="does not know"):
        await asking


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


async def test_requests_have_drained_when_all_have_ended_that_were_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
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
