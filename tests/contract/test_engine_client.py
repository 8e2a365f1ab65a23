"""What AsyncLLM takes for granted of any engine client, asked of the fleet's."""

import asyncio
import logging
import math
from concurrent.futures import Future
from http import HTTPStatus
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from tests.admin.asgi import Client
from tests.contract.stage_models import source
from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.admin.http_admission import AdmissionMiddleware, HttpAdmission, current_response
from vllm_omni_plugin.errors import ReplicaError, RequestRefusedError
from vllm_omni_plugin.integration.core_client import fleet_client
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import AbortedElsewhere
from vllm_omni_plugin.orchestrator.pool.pool_member import ASLEEP_CORDON
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    CallReplicas,
    SubmitRequest,
)
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

STORY = LoRARequest("story", 7, "/loras/story")
CHECKSUMS = [{"of worker 0": "1"}, {"of worker 1": "2"}, {"of worker 0": "3"}]


def test_a_fleet_is_closed_once_with_the_timeout_of_its_requests(fleet: IdleFleet, client: FleetClient) -> None:
    client.shutdown(3.0)
    client.shutdown()
    assert fleet.closed_after == [3.0]
    assert client.resources.engine_dead


def registered(client: FleetClient, request_id: str, **settings: Any) -> tuple[OutputProcessor, RequestOutputCollector]:
    """AsyncLLM's side of a request, of which the client knows."""
    processor = OutputProcessor(None, log_stats=False, **settings)
    client.bind(processor, None)
    params = SamplingParams(detokenize=False)
    queue = RequestOutputCollector(params.output_kind, request_id)
    processor.add_request(source(params=params, request_id=request_id), None, None, 0, queue)
    return processor, queue


async def test_a_request_that_comes_too_late_is_refused_unsent_and_its_state_is_dropped(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    processor, queue = registered(client, "late")
    client.graceful_shutdown.ending = True
    await client.add_request_async(FakeRequest("late"))
    assert await orchestrator.front_end.request_async_queue.get_batch() == [AbortRequests(("late",), whole=True)]
    assert not processor.has_unfinished_requests()
    with pytest.raises(GracefulHTTPError, match="shutting down") as refused:
        queue.get_nowait()
    assert refused.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE


@pytest.mark.parametrize("ids", [("r", "unknown"), ()], ids=["by ids", "all"])
async def test_an_abort_through_another_head_ends_the_requests_of_this_one(
    orchestrator: Orchestrator, client: FleetClient, ids: tuple[str, ...]
) -> None:
    processor, queue = registered(client, "mine")
    aborted = AbortedElsewhere(ids, Future())
    for item in (aborted, EngineApi().idle_report(0)):
        orchestrator.front_end.output_async_queue.put(item)
    await client.get_output_async()
    assert aborted.applied.done()
    assert not processor.has_unfinished_requests()
    output = queue.get_nowait()
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].finish_reason == "abort"
    assert await orchestrator.front_end.request_async_queue.get_batch() == [AbortRequests(("mine",), whole=True)]


async def test_a_further_request_for_an_answer_that_is_refused_is_not_sent(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    processor, _ = registered(client, "further")

    async def app(*_: Any) -> None:
        answer = current_response()
        assert answer is not None
        assert answer.refuse(RequestRefusedError(503, "queue_full", "The queue is full.", 7))
        await client.add_request_async(FakeRequest("further"))

    admission = HttpAdmission(lambda *_: None, lambda _: True, list, (), lambda: 0.0, lambda _: math.inf)
    state = SimpleNamespace(omni_admission=admission)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "app": SimpleNamespace(state=state)}
    http = Client(AdmissionMiddleware(app, frozenset({"/"}), lambda _: True), scope)
    assert await http.status() == HTTPStatus.SERVICE_UNAVAILABLE
    assert await orchestrator.front_end.request_async_queue.get_batch() == [AbortRequests(("further",), whole=True)]
    assert not processor.has_unfinished_requests()


async def test_a_session_that_has_begun_goes_on_when_the_server_is_told_to_end(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "request_states", {"session": "begun"})
    client.graceful_shutdown.ending = True
    await client.add_request_async(FakeRequest("session"))
    (message,) = await orchestrator.front_end.request_async_queue.get_batch()
    assert isinstance(message, SubmitRequest)


class LastFleet(IdleFleet):
    """One whose replicas have finished everything at once."""

    def wait_for_requests(self, timeout: float) -> float:
        return timeout


@pytest.mark.parametrize("end", ["the last answer", "a client that leaves"])
async def test_a_fleet_that_ends_waits_until_asyncllm_has_handled_the_last_outputs(
    orchestrator: Orchestrator, end: str
) -> None:
    client = FleetClient(fleet := LastFleet(orchestrator), SimpleNamespace(), [])
    processor, _ = registered(client, "r")
    ending = asyncio.create_task(asyncio.to_thread(client.shutdown, 60.0))
    done, _ = await asyncio.wait([ending], timeout=0.05)
    assert not done
    processor.abort_requests(["r"], internal=True)
    if end == "the last answer":
        orchestrator.front_end.output_async_queue.put(EngineApi().idle_report(0))
        await client.get_output_async()
    else:
        await client.abort_requests_async(["r"])
    async with asyncio.timeout(10):
        await ending
    (left,) = fleet.closed_after
    assert left is not None
    assert 0 < left < 60


async def test_unfinished_requests_are_ended_when_the_fleet_is_closed(client: FleetClient) -> None:
    processor, queue = registered(client, "r")
    client.shutdown()
    async with asyncio.timeout(10):
        output = await queue.get()
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].finish_reason == "abort"
    assert not processor.has_unfinished_requests()


async def test_answers_are_made_on_asyncllms_loop_until_the_fleet_is_shut_down(client: FleetClient) -> None:
    client.bind(OutputProcessor(None, log_stats=False), None)
    assert not client.can_finish_requests, "this is that loop"
    assert await asyncio.to_thread(lambda: client.can_finish_requests)
    client.shutdown()
    assert not await asyncio.to_thread(lambda: client.can_finish_requests)


@pytest.mark.parametrize("tracing", [False, True])
async def test_requests_are_traced_where_vllm_traces_them(
    orchestrator: Orchestrator, client: FleetClient, tracing: bool
) -> None:
    registered(client, "r", tracing_enabled=tracing)
    await client.add_request_async(FakeRequest("r"))
    (message,) = await orchestrator.front_end.request_async_queue.get_batch()
    assert isinstance(message, SubmitRequest)
    assert (message.traced, message.chosen_replicas) == ((True, []) if tracing else (False, None))


async def test_a_fleet_that_has_failed_refuses_requests_calls_and_reads_and_ignores_aborts(
    orchestrator: Orchestrator, client: FleetClient
) -> None:
    orchestrator.close_queues()
    with pytest.raises(EngineDeadError):
        await client.add_request_async(FakeRequest("r"))
    with pytest.raises(EngineDeadError):
        await client.sleep_async()
    await client.abort_requests_async(["r"])
    with pytest.raises(EngineDeadError):
        await client.get_output_async()
    assert client.resources.engine_dead


async def test_waiters_for_a_fleet_go_on_when_a_replica_serves(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.create_task(client.until_serving())
    await asyncio.sleep(0)
    Thread(target=orchestrator.serving_signal.notify).start()
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done, "a wake-up without a replica that serves ends no wait"
    monkeypatch.setattr(Orchestrator, "can_serve", True)
    Thread(target=orchestrator.serving_signal.notify).start()
    await asyncio.wait_for(waiting, 10)


async def test_a_waiter_whose_loop_ends_at_that_moment_delays_no_other(
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
    orchestrator.serving_signal.notify()
    await asyncio.wait_for(here, 10)


async def test_a_backlog_of_outputs_does_not_keep_the_loop_from_other_work(
    orchestrator: Orchestrator, fleet: IdleFleet
) -> None:
    now = 0.0
    client = FleetClient(fleet, SimpleNamespace(), [], clock=lambda: now)
    for engine_index in range(10):
        orchestrator.front_end.output_async_queue.put(EngineApi().idle_report(engine_index))
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


async def the_call(orchestrator: Orchestrator) -> CallReplicas:
    async with asyncio.timeout(10):
        (call,) = await orchestrator.rpc_async_queue.get_batch()
    assert isinstance(call, CallReplicas)
    return call


async def answered(orchestrator: Orchestrator, asking: Any, *answers: Any) -> Any:
    """What AsyncLLM gets when each replica gives one of these answers."""
    asked = asyncio.ensure_future(asking)
    (await the_call(orchestrator)).reply.set_result(list(answers))
    return await asyncio.wait_for(asked, 10)


@pytest.mark.parametrize(
    ("method", "args", "answers", "whole"),
    [
        ("reset_prefix_cache_async", (), [True, True], True),
        ("reset_prefix_cache_async", (), [True, False], False),
        ("reset_prefix_cache_async", (), [], True),
        ("wake_up_async", (), [True, True], True),
        ("wake_up_async", (), [True, False], False),
        ("add_lora_async", (STORY,), [True, True], True),
        ("add_lora_async", (STORY,), [False, True], False),
        ("pin_lora_async", (7,), [True, True], True),
        ("pin_lora_async", (7,), [True, False], False),
        ("remove_lora_async", (7,), [False, True], True),
        ("remove_lora_async", (7,), [False, False], False),
        ("list_loras_async", (), [[7, 8], [8, 9]], {8}),
        ("list_loras_async", (), [[7, 8]], {7, 8}),
        ("is_sleeping_async", (), [True, True], True),
        ("is_scheduler_paused_async", (), [False, False], False),
        ("get_weight_version_async", (), ["v2", "v2"], "v2"),
        ("collective_rpc_async", ("m",), [["a", "b"], ["c", "d"]], ["a", "b", "c", "d"]),
        ("compute_weight_checksums_async", (), [CHECKSUMS[:2], CHECKSUMS[2:]], CHECKSUMS),
    ],
)
async def test_answers_of_replicas_are_combined_into_the_answer_of_one_engine(
    orchestrator: Orchestrator, client: FleetClient, method: str, args: tuple[Any, ...], answers: list[Any], whole: Any
) -> None:
    assert await answered(orchestrator, getattr(client, method)(*args), *answers) == whole


@pytest.mark.parametrize(
    ("method", "answers"),
    [
        ("is_sleeping", [True, False]),
        ("is_scheduler_paused", [False, False, True]),
        ("get_weight_version", ["v2", "v1", "v2"]),
    ],
)
async def test_where_one_engine_has_one_state_replicas_that_differ_are_an_error(
    orchestrator: Orchestrator, client: FleetClient, method: str, answers: list[Any]
) -> None:
    with pytest.raises(RuntimeError, match=f"different {method} results: .*{answers[-1]!r}"):
        await answered(orchestrator, getattr(client, f"{method}_async")(), *answers)


async def test_methods_that_do_not_apply_to_a_fleet_are_refused(client: FleetClient) -> None:
    for method, argument in {"prepare_elastic_ep": 2, "abort_external_elastic_ep": "why", "handle_fault": None}.items():
        with pytest.raises(NotImplementedError, match="does not apply"):
            await getattr(client, method)(argument)
    with pytest.raises(NotImplementedError, match="does not apply"):
        await client.commit_elastic_ep()


async def test_the_status_names_every_replica_and_whether_it_serves() -> None:
    async with FakeFleet(replicas=2) as fleet:
        client = FleetClient(IdleFleet(fleet.orchestrator), SimpleNamespace(), [])
        fleet.lose(1)
        engines = [{"id": 0, "status": "healthy"}, {"id": 1, "status": "dead"}]
        assert await client.get_status() == {"schema_version": 1, "total_engines": 2, "engines": engines}
        client.shutdown()


async def test_a_head_whose_first_replica_is_lost_at_once_waits_for_the_next(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orchestrator, "has_replicas", True)
    asking = asyncio.create_task(client.get_supported_tasks_async())
    lost = await the_call(orchestrator)
    monkeypatch.setattr(Orchestrator, "has_replicas", False)
    lost.reply.set_exception(ReplicaError("replica 0 is gone"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asking), 0.05)
    assert len(orchestrator.rpc_async_queue) == 0
    monkeypatch.setattr(Orchestrator, "has_replicas", True)
    orchestrator.serving_signal.notify()
    assert await answered(orchestrator, asking, ("generate",)) == ("generate",)


async def test_a_head_waits_for_its_first_replica_however_long_that_takes(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_client, "WAITING_NOTICE_S", 0.001)
    with caplog.at_level(logging.INFO, "vllm"):
        asking = asyncio.create_task(client.get_supported_tasks_async())
        await eventually(lambda: len(caplog.records) > 1 or asking.done(), "two notices")
    assert {record.getMessage() for record in caplog.records} == {
        "Waiting for the first replica to join. The server starts as soon as there is one."
    }
    monkeypatch.setattr(Orchestrator, "has_replicas", True)
    orchestrator.serving_signal.notify()
    assert await answered(orchestrator, asking, ("generate",)) == ("generate",)


async def test_a_head_starts_with_replicas_that_sleep_so_that_an_operator_can_wake_them() -> None:
    async with FakeFleet(replicas=0) as fleet:
        client = FleetClient(IdleFleet(fleet.orchestrator), SimpleNamespace(), [])
        asking = asyncio.create_task(client.get_supported_tasks_async())
        member = fleet.pool.add()
        fleet.orchestrator.cordon(member, ASLEEP_CORDON)
        await asyncio.sleep(0)
        assert not asking.done()
        fleet.join(member).on_call = lambda link, call_id, *_: link.answer(call_id, ["generate"])
        assert await asyncio.wait_for(asking, 10) == ("generate",)
        assert not fleet.orchestrator.can_serve
        client.shutdown()


async def test_a_replica_that_serves_and_fails_to_name_its_tasks_is_an_error(
    orchestrator: Orchestrator, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orchestrator, "has_replicas", True)
    asking = asyncio.create_task(client.get_supported_tasks_async())
    (await the_call(orchestrator)).reply.set_exception(ReplicaError("it does not know"))
    with pytest.raises(ReplicaError, match="does not know"):
        await asking
