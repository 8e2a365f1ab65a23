"""Calls that concern the engine as a whole reach every replica, and answer as one plain engine does."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES

from .server import IN_FLIGHT, MODEL, Server, until

REQUESTS = 8

pytestmark = pytest.mark.both_front_ends

CALLS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/is_sleeping", None),
    ("POST", "/sleep?level=1", None),
    ("GET", "/is_sleeping", None),
    ("GET", "/is_paused", None),
    ("POST", "/wake_up", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/pause?mode=wait", None),
    ("GET", "/is_paused", None),
    ("POST", "/resume", None),
    ("GET", "/is_paused", None),
    ("POST", "/pause?mode=nonsense", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/reset_mm_cache", None),
    ("POST", "/reset_encoder_cache", None),
    ("GET", "/weight_info", None),
    ("POST", "/update_weight_version", {"new_version": "v7"}),
    ("GET", "/weight_info", None),
    ("POST", "/collective_rpc", {"method": "check_health"}),
    ("POST", "/collective_rpc", {"method": "get_supported_kv_cache_layouts"}),
    ("POST", "/collective_rpc", {"method": "update_max_model_len", "args": [1024]}),
    ("GET", "/get_world_size", None),
    ("GET", "/health", None),
)
"""In this order: some show what those before them did."""


def body(number: int = 0) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"Request {number}", "max_tokens": 8, "temperature": 0}


def call(server: Server, method: str, path: str, payload: dict[str, Any] | None) -> tuple[str, int, str]:
    response = httpx.request(method, server.url + path, json=payload, timeout=60.0)
    return path, response.status_code, response.text


def of_two_engines(path: str, status: int, text: str) -> tuple[str, int, str]:
    """The answer of one engine as two give it, as under data parallelism: all results, and all workers counted."""
    match path:
        case "/collective_rpc":
            answer = {"results": 2 * json.loads(text)["results"]}
        case "/get_world_size":
            answer = {"world_size": 2 * json.loads(text)["world_size"]}
        case _:
            return path, status, text
    return path, status, json.dumps(answer, separators=(",", ":"))


def test_calls_answer_as_one_plain_engine_does(plain: Server, fleet: Server) -> None:
    before = fleet.complete()
    assert [call(fleet, *each) for each in CALLS] == [of_two_engines(*call(plain, *each)) for each in CALLS]
    assert fleet.complete() == plain.complete() == before
    assert fleet.replicas_up() == 2


@pytest.mark.skipif(not PAUSE_REFUSES.applies, reason="requests wait in paused engines of this vLLM")
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_during_a_pause_are_refused_as_by_one_plain_engine(plain: Server, fleet: Server, mode: str) -> None:
    def refusal(server: Server) -> tuple[int, str]:
        call(server, "POST", f"/pause?mode={mode}", None)
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json=body(), timeout=60.0)
        finally:
            call(server, "POST", "/resume", None)
        return answer.status_code, answer.json()["error"]["message"]

    assert refusal(fleet) == refusal(plain)
    assert fleet.complete() == plain.complete()
    assert fleet.replicas_up() == 2


def test_a_call_that_every_replica_refuses_is_an_error_and_costs_no_replica(fleet: Server) -> None:
    engines = fleet.engine_pids()
    _, status, _ = call(fleet, "POST", "/collective_rpc", {"method": "no_such_method"})
    assert status == 500
    assert fleet.complete()
    assert (fleet.replicas_up(), fleet.engine_pids()) == (2, engines)


async def test_a_paused_fleet_holds_requests_and_finishes_them_when_resumed(fleet: Server) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60.0) as client:
        await client.post("/pause", params={"mode": "keep"})
        try:
            requests = [
                asyncio.create_task(client.post("/v1/completions", json=body(number))) for number in range(REQUESTS)
            ]
            await asyncio.to_thread(until, lambda: held_by_each(fleet) == [REQUESTS / 2] * 2, "both replicas hold half")
            assert not any(request.done() for request in requests)
        finally:
            await client.post("/resume")
        answers = await asyncio.gather(*requests)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [8] * REQUESTS


async def test_a_pause_that_aborts_ends_the_requests_of_every_replica(fleet: Server) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60.0) as client:
        await client.post("/pause", params={"mode": "keep"})
        try:
            requests = [
                asyncio.create_task(client.post("/v1/completions", json=body(number))) for number in range(REQUESTS)
            ]
            await asyncio.to_thread(until, lambda: held_by_each(fleet) == [REQUESTS / 2] * 2, "both replicas hold half")
            await client.post("/pause", params={"mode": "abort"})
            answers = await asyncio.gather(*requests)
        finally:
            await client.post("/resume")
    assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} == {"abort"}
    assert held_by_each(fleet) == [0, 0]


def test_checksums_are_told_for_every_replica_as_by_data_parallel_engines(plain: Server, fleet: Server) -> None:
    one, both = checksums(plain), checksums(fleet)
    assert both == {"dp0": one["dp0"], "dp1": one["dp0"]}


def checksums(server: Server) -> dict[str, dict[str, str]]:
    """Checksums of the weights by engine. vLLM names a weight `dp0:pp0:...:name`."""
    response = httpx.post(f"{server.url}/weight_checker", json={"action": "checksum"}, timeout=60.0)
    by_engine: dict[str, dict[str, str]] = {}
    for name, checksum in response.raise_for_status().json()["checksums"].items():
        engine, _, weight = name.partition(":")
        by_engine.setdefault(engine, {})[weight] = checksum
    return by_engine


def held_by_each(fleet: Server) -> list[float]:
    return list(fleet.by_replica(IN_FLIGHT).values())
