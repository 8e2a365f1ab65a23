"""Two API server processes in front of two replicas: to clients one server, of which either half may die."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest

from .answers import ask, ask_by, differences
from .api_servers import ApiServers
from .cases import CASES, Case
from .load import Load, Outcome
from .server import ASSIGNMENTS, IN_FLIGHT, Server, complete, replicas, until

BOTH = (0, 1)
QUICK = ("completion-greedy", "completion-stream", "completion-n", "chat-greedy", "chat-stream", "response-greedy")
"""The server's processes are all alike, and one alone is asked everything by `test_same_answers.py`."""
PROMPTS = ("stream 0", "stream 1", "stream 2")
TOKENS = 500
RUNNING = "vllm:num_requests_running"


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in QUICK], ids=str)
def test_either_answers_as_one_plain_engine(plain: Server, api_servers: ApiServers, case: Case) -> None:
    expected = ask(plain, case.path, case.body)
    for number in BOTH:
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
                complete(client, tokens=8)
    until(lambda: counts() == (before[0] + 5, before[1] + 5), "all five are counted")
    assert api_servers.replicas_up() == 2
    assert api_servers.metrics("vllm_omni_fleet:heads") == {(): 2}
    assert api_servers.metrics("vllm_omni_fleet:coordinator_connected") == {(): 1}


def test_work_of_one_is_seen_by_the_other(api_servers: ApiServers, threads: ThreadPoolExecutor) -> None:
    with api_servers.connected(0) as first, api_servers.connected(1) as second:

        def seen() -> int:
            return sum(replica["total_in_flight"] for replica in replicas(second).values())

        with api_servers.engines_standing_still():
            done = threads.submit(complete, first)
            until(lambda: seen() == 1, "the request of the first is in the list of the second")
        done.result()
        until(lambda: seen() == 0, "its end is seen")


def test_one_that_is_killed_takes_only_its_own_connections_with_it(
    api_servers: ApiServers, threads: ThreadPoolExecutor
) -> None:
    with api_servers.connected(1) as client:
        expected = [complete(client, prompt, TOKENS) for prompt in PROMPTS]
    counted = all_assignments(api_servers, threads)
    pids = api_servers.pids
    streams: dict[int, list[Outcome]] = {number: [] for number in BOTH}
    with ExitStack() as stack:
        loads = {number: [Load(stack.enter_context(api_servers.connected(number))) for _ in PROMPTS] for number in BOTH}
        for number in BOTH:
            for load, prompt in zip(loads[number], PROMPTS, strict=True):
                stack.enter_context(load)
                streams[number].append(load.send(TOKENS, stream=True, prompt=prompt, temperature=0))
        # No later, or the first would be done before the last has begun, on a machine that is busy.
        until(lambda: all(any(stream.started.is_set() for stream in streams[number]) for number in BOTH), "both stream")
        psutil.Process(pids[0]).kill()
    assert [stream for stream in streams[1] if not stream.finished_whole] == []
    assert [stream.text for stream in streams[1]] == expected
    # On a busy machine one may have come to its end before the last had begun.
    whole = [stream for stream in streams[0] if stream.finished_whole]
    assert len(whole) < len(PROMPTS)
    assert all(stream.text in expected for stream in whole)
    until(lambda: set(api_servers.by_replica(IN_FLIGHT).values()) == {0}, "nothing is in flight")
    api_servers.wait_for_restart(0, pids[0])
    assert api_servers.pids[1] == pids[1]
    until(lambda: set(api_servers.by_engine(RUNNING).values()) == {0}, "orphaned requests have ended")
    with api_servers.connected(0) as client:
        assert complete(client, PROMPTS[0], TOKENS) == expected[0]
    until(
        lambda: api_servers.total(ASSIGNMENTS) >= counted + len(PROMPTS) + 1,
        "what the killed one had counted, up to its last second, still counts",
    )
