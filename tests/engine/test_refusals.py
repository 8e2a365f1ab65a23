"""Requests that cannot start in time, over real HTTP: their clients are told so by the status, also of streams."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import TWO_REPLICAS
from .server import MODEL, START_S, Server, until
from .servers import Servers

RUNNING_EACH = 2
"""Requests that an engine runs at once."""
FILLING = 20 * RUNNING_EACH
"""Streams that fill both engines, what they have ahead, and the queue of the head."""
LONG = 900
TIMEOUT_S = 2.0
REFUSED = "vllm_omni_fleet:requests_refused_total"


@pytest.fixture
def admitting(servers: Servers, tiny_model: Path) -> Server:
    """A head that orders what waits, with two local replicas."""
    plan = tiny_model.with_name("admission.yaml")
    plan.write_text("classes:\n  - name: only\n")
    flags = ("--omni-admission", str(plan), "--max-num-seqs", str(RUNNING_EACH))
    server = servers.get("admitting", tiny_model, *TWO_REPLICAS, *flags, engines=2)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    return server


def body(prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


def refused(server: Server) -> float:
    return sum(server.metrics(REFUSED).values())


async def test_a_request_that_cannot_start_in_time_is_refused_with_the_true_status(admitting: Server) -> None:
    before = refused(admitting)
    async with httpx.AsyncClient(base_url=admitting.url, timeout=START_S) as http:
        filling = [
            asyncio.create_task(http.post("/v1/completions", json=body(f"client {number}", LONG, stream=True)))
            for number in range(FILLING)
        ]
        try:
            running = lambda: sum(admitting.by_engine("vllm:num_requests_running").values())  # noqa: E731
            await asyncio.to_thread(until, lambda: running() == 2 * RUNNING_EACH, "both engines are full")
            asking = [
                http.post(
                    "/v1/completions",
                    json=body("late", 4, stream),
                    headers={"X-Request-Timeout": str(TIMEOUT_S)},
                )
                for stream in (False, True)
            ]
            for answer in await asyncio.gather(*asking):
                assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
                assert answer.headers["content-type"] == "application/json"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert "x-omni-replica" not in answer.headers
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("Service Unavailable", 503)
            assert {stream.result().status_code for stream in filling if stream.done()} <= {httpx.codes.OK}
        finally:
            for stream in filling:
                stream.cancel()
            await asyncio.gather(*filling, return_exceptions=True)
    assert refused(admitting) == before + 2
    until(lambda: not sum(admitting.by_replica("vllm_omni_fleet:requests_in_flight").values()), "all are given up")


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_starts_in_time_is_answered(admitting: Server, stream: bool) -> None:
    with admitting.http(START_S) as http:
        headers = {"X-Request-Timeout": str(START_S)}
        answer = http.post("/v1/completions", json=body("in time", 4, stream), headers=headers).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


def test_a_time_that_is_none_is_the_client_s_mistake(admitting: Server) -> None:
    with admitting.http() as http:
        answer = http.post("/v1/completions", json=body("x", 4, False), headers={"X-Request-Timeout": "soon"})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "X-Request-Timeout: 'soon' is not a number of seconds above 0." in answer.text
