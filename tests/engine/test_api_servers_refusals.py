"""Requests that may not come in or cannot start in time, over real HTTP and two API servers: clients are told so by the
status, also of streams.

vLLM's Rust front end has no second API server: for it see `tests/contract/rust_front_end`.
"""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from .api_servers import ApiServers
from .conftest import ADMISSION, admission_file
from .server import MODEL, START_S, replicas, until

FILLING = 24
"""Long prompts that fill what both engines are sent ahead, and the queues of both API servers."""
LONG = "once upon a time " * 200
WAITING = 5
TIMEOUT_S = 2.0
REFUSED = "vllm_omni_fleet:requests_refused_total"
QUEUED = "vllm_omni_fleet:requests_queued"


@pytest.fixture
def file(tiny_model: Path) -> Path:
    return admission_file(tiny_model)


def body(prompt: str, stream: bool = False) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": stream}


def test_a_request_that_cannot_start_in_time_is_refused_with_the_true_status(
    api_servers: ApiServers, threads: ThreadPoolExecutor
) -> None:
    before = api_servers.total(REFUSED)
    with api_servers.http(START_S) as http:

        def ask(stream: bool, **headers: str) -> httpx.Response:
            return http.post("/v1/completions", json=body(LONG, stream), headers=headers)

        with api_servers.engines_standing_still():
            filling = [threads.submit(ask, stream=True) for _ in range(FILLING)]
            until(lambda: api_servers.total(QUEUED) >= FILLING / 4, "both engines are full and requests wait")
            late = [threads.submit(ask, stream, **{"X-Request-Timeout": str(TIMEOUT_S)}) for stream in (False, True)]
            answers = [future.result() for future in late]
        assert {future.result().status_code for future in filling} == {httpx.codes.OK}
    for answer in answers:
        assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert "x-omni-replica" not in answer.headers
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("Service Unavailable", 503)
    until(lambda: api_servers.total(REFUSED) == before + 2, "both are counted")


def both_have_said(server: ApiServers, text: str, times: int) -> None:
    """Return once each API server has logged this so often."""

    def counts() -> set[int]:
        lines = [line for line in server.log.read_text().splitlines() if text in line]
        return {sum(f"(ApiServer_{number} " in line for line in lines) for number in (0, 1)}

    until(lambda: counts() == {times}, f"both say {text!r} {times} times")


def test_a_file_that_is_read_while_they_serve_bounds_what_waits_at_both_api_servers_together(
    api_servers: ApiServers, file: Path, threads: ThreadPoolExecutor
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(api_servers.connected(number)) for number in (0, 1)]
        file.write_text(f"{ADMISSION}max_waiting_requests: {WAITING}\n")
        answer = clients[0].post("/omni/admission")
        assert answer.json() == {"changes": [f"max_waiting_requests: none -> {WAITING}"]}
        for client in clients:
            # The key for changes would make their requests those of another tenant.
            client.headers.pop("Authorization")
        both_have_said(api_servers, "Admission uses the changed file", 1)
        file.write_text("max_wait: soon\n")
        os.kill(api_servers.process.pid, signal.SIGHUP)
        both_have_said(api_servers, "The admission file has an error", 1)
        http = stack.enter_context(api_servers.http(START_S))

        def seen() -> set[int]:
            return {sum(replica["total_in_flight"] for replica in replicas(client).values()) for client in clients}

        def ask(client: httpx.Client) -> httpx.Response:
            return client.post("/v1/completions", json=body(LONG))

        asking: list[Future[httpx.Response]] = []

        def came() -> bool:
            return asking[-1].done() or seen() == {len(asking) - api_servers.total(QUEUED)}

        def ask_until_refused(client: httpx.Client) -> httpx.Response:
            while not asking or not asking[-1].done():
                # Both know of each that an engine has before the next one comes, to whichever of them.
                asking.append(threads.submit(ask, client))
                until(came, "it runs, waits or is refused")
            return asking.pop().result()

        until(lambda: seen() == {0} and not api_servers.total(QUEUED), "nothing is left of the requests before")
        with api_servers.engines_standing_still():
            refusals = [ask_until_refused(client) for client in (http, *clients)]
            # A few more than may wait, since each hears of the other's queue a moment later.
            assert WAITING <= api_servers.total(QUEUED) < 2 * WAITING
        answers = [future.result() for future in asking]
    assert [refusal.status_code for refusal in refusals] == [httpx.codes.SERVICE_UNAVAILABLE] * 3
    assert all("The queue is full." in refusal.text for refusal in refusals)
    assert {answer.status_code for answer in answers} == {httpx.codes.OK}
    file.write_text(ADMISSION)
    os.kill(api_servers.process.pid, signal.SIGHUP)
    both_have_said(api_servers, "Admission uses the changed file", 2)
