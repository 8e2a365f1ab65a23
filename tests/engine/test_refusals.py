"""Requests that may not come in or cannot start in time, over real HTTP and two API servers: clients are told so by the
status, also of streams."""

import asyncio
import os
import signal
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from .api_servers import ApiServers
from .conftest import TWO_REPLICAS
from .server import MODEL, START_S, Server, until
from .servers import Servers

RUNNING_EACH = 2
"""Requests that an engine runs at once."""
FILLING = 20 * RUNNING_EACH
"""Streams that fill both engines, what they have ahead, and the queue of the head."""
WAITING = 5
LONG = 900
TIMEOUT_S = 2.0
REFUSED = "vllm_omni_fleet:requests_refused_total"


PLAN = "classes:\n  - name: only\n"


@pytest.fixture
def plan(tiny_model: Path) -> Path:
    return tiny_model.with_name("admission.yaml")


@pytest.fixture
def admitting(servers: Servers, tiny_model: Path, plan: Path) -> ApiServers:
    """Two API servers that order what waits, with two local replicas."""

    def start(log: Path) -> ApiServers:
        plan.write_text(PLAN)
        flags = (*TWO_REPLICAS, "--omni-admission", str(plan), "--max-num-seqs", str(RUNNING_EACH))
        several = ("--api-server-count", "2", "--omni-drain-timeout", "0")
        scratch = tempfile.mkdtemp(prefix="api-")
        return ApiServers(tiny_model, log, *flags, *several, scratch=scratch).__enter__()

    server: ApiServers = servers.keep("admitting", start, engines=2)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    return server


def body(prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


def refused(server: Server) -> float:
    return sum(server.metrics(REFUSED).values())


async def test_a_request_that_cannot_start_in_time_is_refused_with_the_true_status(admitting: ApiServers) -> None:
    before = refused(admitting)
    async with httpx.AsyncClient(base_url=admitting.url, timeout=START_S) as http:
        filling = [
            asyncio.create_task(http.post("/v1/completions", json=body(f"client {number}", LONG, stream=True)))
            for number in range(FILLING)
        ]
        try:
            queued = lambda: admitting.total("vllm_omni_fleet:requests_queued")  # noqa: E731
            await asyncio.to_thread(until, lambda: queued() >= FILLING / 2, "both engines are full and requests wait")
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
    until(lambda: refused(admitting) == before + 2, "both are counted")
    until(lambda: not sum(admitting.by_replica("vllm_omni_fleet:requests_in_flight").values()), "all are given up")


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_starts_in_time_is_answered(admitting: ApiServers, stream: bool) -> None:
    with admitting.http(START_S) as http:
        headers = {"X-Request-Timeout": str(START_S)}
        answer = http.post("/v1/completions", json=body("in time", 4, stream), headers=headers).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


def test_a_time_that_is_none_is_the_client_s_mistake(admitting: ApiServers) -> None:
    with admitting.http() as http:
        answer = http.post("/v1/completions", json=body("x", 4, False), headers={"X-Request-Timeout": "soon"})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "X-Request-Timeout: 'soon' is not a number of seconds above 0." in answer.text


def both_have_said(server: ApiServers, text: str, times: int) -> None:
    """Return once each API server has logged this so often."""

    def counts() -> set[int]:
        lines = [line for line in server.log.read_text().splitlines() if text in line]
        return {sum(f"(ApiServer_{number} " in line for line in lines) for number in (0, 1)}

    until(lambda: counts() == {times}, f"both say {text!r} {times} times")


def test_a_file_that_is_read_while_they_serve_bounds_what_waits_at_both_api_servers_together(
    admitting: ApiServers, plan: Path
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(admitting.connected(number)) for number in (0, 1)]
        plan.write_text(f"{PLAN}max_waiting_requests: {WAITING}\n")
        answer = clients[0].post("/omni/admission")
        assert answer.json() == {"changes": [f"max_waiting_requests: none -> {WAITING}"]}
        both_have_said(admitting, "Admission goes by the new", 1)
        plan.write_text("max_wait: soon\n")
        os.kill(admitting.process.pid, signal.SIGHUP)
        both_have_said(admitting, "is not usable", 1)
        http, threads = stack.enter_context(admitting.http(START_S)), stack.enter_context(ThreadPoolExecutor(FILLING))

        def seen() -> set[int]:
            listed = [client.get("/omni/replicas").json()["replicas"] for client in clients]
            return {sum(replica["in_flight"] for replica in replicas) for replicas in listed}

        def ask(client: httpx.Client) -> httpx.Response:
            return client.post("/v1/completions", json=body("x", 4, stream=False))

        asking: list[Future[httpx.Response]] = []

        def came() -> bool:
            return asking[-1].done() or seen() == {len(asking)}

        with admitting.engines_standing_still():
            while not asking or not asking[-1].done():
                # Both know of each before the next one comes, to whichever of them.
                asking.append(threads.submit(ask, http))
                until(came, "it waits or is refused")
            until(lambda: admitting.total("vllm_omni_fleet:requests_queued") == WAITING, "as many wait as may")
            refusals = [asking.pop().result(), *map(ask, clients)]
        answers = [future.result() for future in asking]
    assert [refusal.status_code for refusal in refusals] == [httpx.codes.SERVICE_UNAVAILABLE] * 3
    assert all("The queue is full." in refusal.text for refusal in refusals)
    assert {answer.status_code for answer in answers} == {httpx.codes.OK}
    plan.write_text(PLAN)
    os.kill(admitting.process.pid, signal.SIGHUP)
    both_have_said(admitting, "Admission goes by the new", 2)
