"""Headless nodes on real engines: every way in which they can fail under streams, and what the streams see."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .load import Load, Outcome
from .nodes import NodeFleet
from .server import START_S, Server, until
from .servers import Servers

STREAMS = 6
TOKENS = 900
TIMEOUT_S = 4.0
TIMING = ("--omni-heartbeat-timeout", str(TIMEOUT_S), "--omni-heartbeat-interval", "1")
IN_FLIGHT = "vllm_omni:requests_in_flight"
MOVES = "vllm_omni:request_moves_total"
RUNNING = "vllm:num_requests_running"


@pytest.fixture
def fleet(servers: Servers, tiny_model: Path) -> Iterator[NodeFleet]:
    """A head without engines and two nodes, both in service before each test and after it."""

    def start(log: Path) -> NodeFleet:
        return NodeFleet(tiny_model, log, nodes=2, flags=TIMING)

    running: NodeFleet = servers.keep("nodes", start, engines=2)
    running.wait_for_replicas(2)
    yield running
    running.wait_for_replicas(2)
    assert set(running.head.by_replica(IN_FLIGHT).values()) == {0}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The text of each prompt without any fault, filled by the first test that needs it."""
    return {}


@contextmanager
def streams(head: Server, expected: dict[str, str]) -> Iterator[list[Outcome]]:
    """Greedy streams that are all under way in the block; each must end as if nothing had happened."""
    prompts = [f"the story of number {number}" for number in range(STREAMS)]
    if not expected:
        with Load(head) as load:
            sent = [load.send(TOKENS, stream=True, prompt=prompt, temperature=0) for prompt in prompts]
        assert [outcome for outcome in sent if not outcome.finished_whole] == []
        expected.update({prompt: outcome.text for prompt, outcome in zip(prompts, sent, strict=True)})
    with Load(head) as load:
        sent = [load.send(TOKENS, stream=True, prompt=prompt, temperature=0) for prompt in prompts]
        assert all(outcome.started.wait(60) for outcome in sent)
        yield sent
    assert [outcome for outcome in sent if not outcome.finished_whole] == []
    assert [outcome.text for outcome in sent] == [expected[prompt] for prompt in prompts]


def total(head: Server, name: str) -> float:
    return sum(head.metrics(name).values())


def test_a_killed_engine_is_replaced_and_its_streams_go_on(fleet: NodeFleet, expected: dict[str, str]) -> None:
    node = fleet.nodes[0]
    pid = node.engine.pid
    with streams(fleet.head, expected):
        node.engine.kill()
    fleet.wait_for_replicas(2)
    assert node.engine.pid != pid
    assert node.process.poll() is None


def test_a_killed_server_leaves_no_engine_behind(fleet: NodeFleet, expected: dict[str, str]) -> None:
    node = fleet.nodes[1]
    processes = psutil.Process(node.process.pid).children(recursive=True)
    with streams(fleet.head, expected):
        node.kill()
    until(lambda: not any(process.is_running() for process in processes), "its engine has ended with it")
    fleet.replace_node(node)


def test_a_stopped_engine_is_left_and_taken_back(fleet: NodeFleet, expected: dict[str, str]) -> None:
    engine = fleet.nodes[0].engine
    with streams(fleet.head, expected):
        engine.send_signal(signal.SIGSTOP)
        try:
            fleet.wait_for_replicas(1)
        finally:
            engine.resume()
    fleet.wait_for_replicas(2)
    assert fleet.nodes[0].engine.pid == engine.pid


def test_a_stopped_server_is_left_and_taken_back(fleet: NodeFleet, expected: dict[str, str]) -> None:
    node = fleet.nodes[0]
    server, engine = psutil.Process(node.process.pid), node.engine
    with streams(fleet.head, expected):
        server.suspend()
        try:
            fleet.wait_for_replicas(1)
        finally:
            server.resume()
    fleet.wait_for_replicas(2)
    assert node.engine.pid == engine.pid


def test_a_killed_coordinator_is_replaced_and_nobody_notices(fleet: NodeFleet, expected: dict[str, str]) -> None:
    engines = [node.engine.pid for node in fleet.nodes]
    with streams(fleet.head, expected):
        coordinator = fleet.coordinator
        coordinator.kill()
        until(lambda: not coordinator.is_running(), "the coordinator is gone")
        assert fleet.head.replicas_up() == 2
    until(lambda: fleet.coordinator.pid != coordinator.pid, "the coordinator is back")
    assert [node.engine.pid for node in fleet.nodes] == engines
    assert fleet.head.health() == 200


def test_a_killed_head_finds_its_replicas_again_with_nothing_left_running(
    fleet: NodeFleet, expected: dict[str, str]
) -> None:
    engines = [node.engine.pid for node in fleet.nodes]
    with Load(fleet.head) as load:
        lost = [load.send(TOKENS, stream=True) for _ in range(STREAMS)]
        assert all(outcome.started.wait(60) for outcome in lost)
        fleet.head.kill()
    fleet.restart_head()
    fleet.head.wait()
    fleet.wait_for_replicas(2)
    assert [node.engine.pid for node in fleet.nodes] == engines
    with streams(fleet.head, expected):
        pass
    until(lambda: set(fleet.head.by_engine(RUNNING).values()) == {0}, "orphaned requests have ended", START_S)


def test_a_node_that_drains_in_time_disturbs_nobody(fleet: NodeFleet, expected: dict[str, str]) -> None:
    node = fleet.nodes[0]
    moves = total(fleet.head, MOVES)
    with streams(fleet.head, expected):
        node.process.terminate()
    assert node.process.wait(60) == 0
    assert total(fleet.head, MOVES) == moves
    fleet.replace_node(node)


def test_what_a_drain_has_no_time_for_moves(fleet: NodeFleet, expected: dict[str, str]) -> None:
    node = fleet.nodes[0]
    moves = total(fleet.head, MOVES)
    with streams(fleet.head, expected):
        node.process.terminate()
        until(lambda: node.says("leaves when"), "it drains")
        node.process.terminate()
        assert node.process.wait(60) == 0
    assert total(fleet.head, MOVES) > moves
    fleet.replace_node(node)
