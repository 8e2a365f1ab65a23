"""Two API server processes in front of two replicas: to clients one server, of which either half may die."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from .answers import ask, ask_by, differences
from .api_servers import ApiServers
from .cases import CASES, Case
from .server import MODEL, Server, until

BOTH = (0, 1)
QUICK = ("completion-greedy", "completion-stream", "completion-n", "chat-greedy", "chat-stream", "response-greedy")
"""The server's processes are all alike, and one alone is asked everything by `test_same_answers.py`."""
STREAMS = 3
TOKENS = 500
ASSIGNMENTS = "vllm_omni_fleet:assignments_total"
IN_FLIGHT = "vllm_omni_fleet:requests_in_flight"
RUNNING = "vllm:num_requests_running"


@dataclass
class Stream:
    """A streamed completion as its client saw it.

    Attributes:
        started: set with the first output.
        broken: why the connection ended before the answer did; None if it did not.
    """

    started: threading.Event = field(default_factory=threading.Event)
    text: str = ""
    broken: httpx.TransportError | None = None

    def run(self, client: httpx.Client, prompt: str) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        try:
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                for line in response.iter_lines():
                    self.text += line
                    self.started.set()
        except httpx.TransportError as error:
            self.broken = error


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * STREAMS) as threads:
        yield threads


def complete(client: httpx.Client, prompt: str = "once", tokens: int = 8) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


@pytest.mark.parametrize(
    "case", [case if str(case) in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES], ids=str
)
def test_either_answers_as_one_plain_engine(plain: Server, api_servers: ApiServers, case: Case) -> None:
    expected = ask(plain, case.path, case.body)
    for number in BOTH if case.reaches_engine() else BOTH[:1]:
        with api_servers.connected(number) as client:
            assert differences(expected, ask_by(client, case.path, case.body)) == []


def all_assignments(api_servers: ApiServers, threads: ThreadPoolExecutor) -> float:
    """What the metrics count when they count all that was sent before.

    They are read from files that each process writes once a second: those that show a request show all before it.
    """
    until(lambda: api_servers.total(IN_FLIGHT) == 0, "nothing is in flight")
    with api_servers.connected(0) as first, api_servers.connected(1) as second:
        with api_servers.engines_standing_still():
            running = [threads.submit(complete, client) for client in (first, second)]
            until(lambda: api_servers.total(IN_FLIGHT) == len(BOTH), "both have written")
        for one in running:
            one.result()
    return api_servers.total(ASSIGNMENTS)


def test_metrics_are_those_of_both_whichever_is_asked(api_servers: ApiServers, threads: ThreadPoolExecutor) -> None:
    def counts() -> tuple[float, float]:
        return api_servers.total(ASSIGNMENTS), api_servers.total("vllm:request_success_total")

    before = (all_assignments(api_servers, threads), counts()[1])
    for number, requests in zip(BOTH, (2, 3), strict=True):
        with api_servers.connected(number) as client:
            for _ in range(requests):
                complete(client)
    until(lambda: counts() == (before[0] + 5, before[1] + 5), "all five are counted")
    assert api_servers.replicas_up() == 2
    assert api_servers.metrics("vllm_omni_fleet:heads") == {(): 2}
    assert api_servers.metrics("vllm_omni_fleet:coordinator_connected") == {(): 1}


def test_work_of_one_is_seen_by_the_other(api_servers: ApiServers, threads: ThreadPoolExecutor) -> None:
    with api_servers.connected(0) as first, api_servers.connected(1) as second:

        def seen() -> int:
            listed = second.get("/omni/replicas").json()["replicas"]
            return sum(replica["total_in_flight"] for replica in listed)

        with api_servers.engines_standing_still():
            done = threads.submit(complete, first)
            until(lambda: seen() == 1, "the request of the first is in the list of the second")
        done.result()
        until(lambda: seen() == 0, "its end is seen")


def test_one_that_is_killed_takes_only_its_own_connections_with_it(
    api_servers: ApiServers, threads: ThreadPoolExecutor
) -> None:
    prompts = [f"stream {number}" for number in range(STREAMS)]
    with api_servers.connected(1) as client:
        expected = [answer_text(client, prompt) for prompt in prompts]
    counted = all_assignments(api_servers, threads)
    pids = api_servers.pids
    with ExitStack() as connections:
        clients = {
            number: [connections.enter_context(api_servers.connected(number)) for _ in prompts] for number in BOTH
        }
        streams: dict[int, list[Stream]] = {number: [Stream() for _ in prompts] for number in BOTH}
        running: list[Future[None]] = [
            threads.submit(stream.run, client, prompt)
            for number in BOTH
            for stream, client, prompt in zip(streams[number], clients[number], prompts, strict=True)
        ]
        # No later, or the first would be done before the last has begun, on a machine that is busy.
        until(lambda: all(any(stream.started.is_set() for stream in streams[number]) for number in BOTH), "both stream")
        psutil.Process(pids[0]).kill()
        for future in running:
            future.result()
    assert [stream.broken for stream in streams[1]] == [None] * STREAMS
    assert [joined(stream.text) for stream in streams[1]] == expected
    # On a busy machine one may have come to its end before the last had begun.
    whole = [stream for stream in streams[0] if stream.broken is None]
    assert len(whole) < STREAMS
    assert all(joined(stream.text) in expected for stream in whole)
    until(lambda: set(api_servers.by_replica(IN_FLIGHT).values()) == {0}, "nothing is in flight")
    api_servers.wait_for_restart(0, pids[0])
    assert api_servers.pids[1] == pids[1]
    until(lambda: set(api_servers.by_engine(RUNNING).values()) == {0}, "orphaned requests have ended")
    with api_servers.connected(0) as client:
        assert answer_text(client, prompts[0]) == expected[0]
    until(
        lambda: api_servers.total(ASSIGNMENTS) >= counted + STREAMS + 1,
        "what the killed one had counted, up to its last second, still counts",
    )


def answer_text(client: httpx.Client, prompt: str) -> str:
    text: str = complete(client, prompt, TOKENS)["choices"][0]["text"]
    return text


def joined(events: str) -> str:
    payloads = events.split("data: ")[1:]
    return "".join(json.loads(payload)["choices"][0]["text"] for payload in payloads if payload != "[DONE]")
