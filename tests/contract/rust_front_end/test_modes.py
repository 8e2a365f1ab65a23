"""What clients and operators say to the front end itself reaches all replicas."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tests.fakes.conditions import eventually
from vllm_omni_plugin.admin.http_admission import tenant_headers
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms
from vllm_omni_plugin.integration.rust_front_end.client_terms import terms_reader

from .head import Head, answers_itself, started_head
from .played import READY, EngineLink, RustFleet


@pytest.fixture(autouse=True)
def _opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens the routes of developers."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")


@pytest.fixture
async def head(tiny_model: Path, sockets: Path) -> AsyncIterator[Head]:
    async with started_head(tiny_model) as head:
        answers_calls(head.fleet, None)
        yield head


def answers_calls(fleet: RustFleet, result: Any) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, result))


def calls(link: EngineLink) -> list[tuple[str, list[Any]]]:
    return [(method, list(args)) for _, method, args in link.calls]


@pytest.mark.parametrize(
    ("path", "call", "result"),
    [
        ("/sleep?level=1", ("sleep", [1, "abort"]), None),
        ("/pause", ("pause_generation", ["abort", True]), None),
        ("/wake_up", ("wake_up", [None]), True),
        ("/resume", ("resume_scheduler", []), None),
        ("/reset_prefix_cache", ("reset_prefix_cache", [False, False]), True),
        ("/reset_mm_cache", ("reset_mm_cache", []), None),
        ("/reset_encoder_cache", ("reset_encoder_cache", []), None),
    ],
)
async def test_calls_of_operators_reach_all_engines(
    head: Head, path: str, call: tuple[str, list[Any]], result: Any
) -> None:
    answers_calls(head.fleet, result)
    answer = await head.client.post(path)
    assert answer.status_code == 200, answer.text
    assert [calls(link) for link in head.fleet.links.values()] == [[call]] * 2


async def test_a_call_of_all_workers_returns_the_results_of_all_engines(head: Head) -> None:
    answers_calls(head.fleet, ["one worker"])
    answer = await head.client.post("/collective_rpc", json={"method": "name"})
    assert answer.json() == {"results": ["one worker"] * 2}


async def test_sessions_arrive(head: Head) -> None:
    waiting = head.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "red"}, headers={"X-Session-ID": "talk"}
    )
    answers_itself(head.fleet)
    assert (await waiting).status_code == 200
    [asked] = [request for link in head.fleet.links.values() for request in link.requests.values()]
    assert asked.session_id == "talk"


async def test_tenants_and_deadlines_arrive_and_engines_do_not_see_them(head: Head) -> None:
    answers_itself(head.fleet)
    seen: list[RequestTerms | None] = []
    read = terms_reader(tenant_headers(None, "admission.yaml"))
    head.fleet.read_terms = lambda request: seen.append(read(request)) or seen[-1]
    said = {"X-Tenant-ID": "acme", "X-Request-Timeout": 2.5}
    answer: httpx.Response = await head.ask(vllm_xargs=said)
    assert answer.status_code == 200, answer.text
    assert seen == [RequestTerms("acme", 2.5)]
    [asked] = [request for link in head.fleet.links.values() for request in link.requests.values()]
    assert asked.sampling_params.extra_args is None
    await head.ask(vllm_xargs={"X-Tenant-ID": "müller", "X-Request-Timeout": None})
    await head.ask(vllm_xargs={"X-Tenant-ID": None, "x-gateway-fairness-id": "flow"})
    assert seen[1:] == [RequestTerms("müller"), RequestTerms("flow")]
    refused = await head.ask(vllm_xargs={"X-Request-Timeout": "soon"})
    assert (refused.status_code, "X-Request-Timeout" in refused.json()["error"]["message"]) == (400, True)


async def test_requests_of_a_class_of_lower_priorities_start_first(tiny_model: Path, sockets: Path) -> None:
    plan = AdmissionConfig(classes=(RequestClass(name="interactive", priority_at_most=0), RequestClass(name="batch")))
    one_sequence = msgspec.msgpack.encode(msgspec.msgpack.decode(READY) | {"max_num_seqs": 1})
    fleet = RustFleet(replicas=1, admission=plan, ready_response=one_sequence)
    async with started_head(tiny_model, fleet=fleet) as head:
        [link] = fleet.links.values()
        asking = [head.ask_later(priority=5) for _ in range(8)]
        await head.requested(8)
        before = len(link.added)
        assert before < 8
        asking.append(head.ask_later(priority=0))
        await head.requested(9)
        for number in range(9):
            await eventually(lambda number=number: len(link.added) > number, "the next request")
            link.say_outputs(outputs=[EngineCoreOutput(link.added[number], [5], finish_reason=FinishReason.LENGTH)])
        assert [(await answer).status_code for answer in asking] == [200] * 9
        assert [request.priority for request in link.requests.values()] == [5] * before + [0] + [5] * (8 - before)
