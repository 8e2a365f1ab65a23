"""Deadlines, tenants and a full queue, as clients of a head with either front end give and see them.

What several API servers do together is in `test_refusals`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from .server import FRONT_ENDS, MODEL, RUST, START_S, Server, until
from .servers import Servers
from .suspended import PATIENT, standing_still

RUNNING = 2
"""Requests that the engine runs at once."""
WAITING = 5
"""Those that may wait, of all tenants."""
THREADS = 40
"""More than an engine runs and is sent ahead, and may wait."""
TIMEOUT_S = 2.0
ADMISSION = f"max_waiting_requests: {WAITING}\ntenants:\n  small:\n    max_in_flight: 1\n"
IN_FLIGHT = "vllm_omni_fleet:requests_in_flight"
QUEUED = "vllm_omni_fleet:requests_queued"
REFUSED = "vllm_omni_fleet:requests_refused_total"
TIMEOUT, TENANT = "X-Request-Timeout", "X-Tenant-ID"
NONE: Mapping[str, str | float] = {}

pytestmark = [pytest.mark.both_front_ends, pytest.mark.long]


class Refusal(NamedTuple):
    """What a client got: the status of the answer, the code of the error, and its message."""

    status: int
    code: int
    message: str


def refusal(response: httpx.Response) -> Refusal:
    if response.headers["content-type"].startswith("text/event-stream"):
        *_, event = (line for line in response.text.splitlines() if line.startswith("data: {"))
        error = json.loads(event.removeprefix("data: "))["error"]
    else:
        error = response.json()["error"]
    return Refusal(response.status_code, error["code"], error["message"])


class Client:
    """Asks for completions, and tells the fleet its terms where the front end of a server lets it.

    Attributes:
        refused_stream: status of a stream that is refused: that of vLLM's Rust front end has begun when it is.
        over_limit: status of a request beyond what its tenant may have: vLLM's Rust front end refuses with 503 only.
    """

    def __init__(self, server: Server, front_end: str) -> None:
        self._http = server.http(START_S)
        self._is_rust = front_end == RUST
        self.refused_stream, self.over_limit = (200, 503) if self._is_rust else (503, 429)

    def close(self) -> None:
        self._http.close()

    def ask(self, terms: Mapping[str, str | float] = NONE, stream: bool = False) -> httpx.Response:
        body: dict[str, Any] = {"model": MODEL, "prompt": "once", "max_tokens": 4, "ignore_eos": True, "stream": stream}
        if self._is_rust:
            return self._http.post("/v1/completions", json={**body, "vllm_xargs": terms})
        return self._http.post("/v1/completions", json=body, headers={name: str(terms[name]) for name in terms})


@pytest.fixture
def head(servers: Servers, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, front_end: str) -> Server:
    """One replica, whose engine may stand still."""
    (file := tmp_path_factory.mktemp("admission") / "admission.yaml").write_text(ADMISSION)
    flags = ("--omni-dp-size-local", "1", "--max-num-seqs", str(RUNNING), "--omni-admission", str(file), *PATIENT)
    return servers.get(f"deadlines-{front_end}", tiny_model, *flags, engines=1, **FRONT_ENDS[front_end])


@pytest.fixture
def client(head: Server, front_end: str) -> Iterator[Client]:
    client = Client(head, front_end)
    yield client
    client.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as threads:
        yield threads


def send(head: Server, threads: ThreadPoolExecutor, ask: Callable[[], httpx.Response]) -> Future[httpx.Response]:
    """Send a request and return once it waits or a replica is charged with it."""

    def known() -> float:
        return head.total(IN_FLIGHT) + head.total(QUEUED)

    before = known()
    answer = threads.submit(ask)
    until(lambda: known() > before, "it waits or is assigned")
    return answer


def test_one_that_cannot_start_in_time_is_refused_and_so_is_one_that_finds_the_queue_full(
    head: Server, client: Client, threads: ThreadPoolExecutor
) -> None:
    before = head.total(REFUSED)
    with standing_still(head.engine_pids().values()):
        asking = []
        while head.total(QUEUED) == 0:
            asking.append(send(head, threads, client.ask))
        late = [threads.submit(client.ask, {TIMEOUT: TIMEOUT_S}, stream) for stream in (False, True)]
        too_late = [refusal(future.result()) for future in late]
        while head.total(QUEUED) < WAITING:
            asking.append(send(head, threads, client.ask))
        full = [refusal(client.ask(stream=stream)) for stream in (False, True)]
        assert not any(future.done() for future in asking)
    assert [(got.status, got.code) for got in too_late] == [(503, 503), (client.refused_stream, 503)]
    assert [(got.status, got.code) for got in full] == [(503, 503), (client.refused_stream, 503)]
    assert all("The queue is full." in got.message for got in full)
    assert {future.result().status_code for future in asking} == {httpx.codes.OK}
    until(lambda: head.total(REFUSED) == before + 4, "all four are counted")


def test_a_tenant_gets_no_more_than_it_may_have(head: Server, client: Client, threads: ThreadPoolExecutor) -> None:
    with standing_still(head.engine_pids().values()):
        first = send(head, threads, partial(client.ask, {TENANT: "small"}))
        refused = refusal(client.ask({TENANT: "small"}))
        other = send(head, threads, partial(client.ask, {TENANT: "other"}))
    assert (refused.status, refused.code) == (client.over_limit, client.over_limit)
    assert refused.message.startswith("The tenant has 1 request in flight")
    assert {first.result().status_code, other.result().status_code} == {httpx.codes.OK}


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_starts_in_time_is_answered(client: Client, stream: bool) -> None:
    answer = client.ask({TIMEOUT: START_S}, stream).raise_for_status()
    assert "error" not in answer.text


def test_a_time_that_is_none_is_the_client_s_mistake(client: Client) -> None:
    got = refusal(client.ask({TIMEOUT: "soon"}))
    assert (got.status, got.code) == (400, 400)
    assert "X-Request-Timeout: 'soon' is not a number of seconds above 0." in got.message
