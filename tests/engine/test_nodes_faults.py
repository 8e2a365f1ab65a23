"""Headless nodes on real engines: every way in which they can fail under streams, and what the streams see."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from .load import Load, Outcome
from .nodes import NodeFleet
from .server import MOVES, START_S, STOP_S, Server, until

STREAMS = 6
TOKENS = 900
RUNNING = "vllm:num_requests_running"

pytestmark = pytest.mark.both_front_ends


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


@pytest.mark.both_front_ends(newest=True)
def test_a_killed_engine_is_replaced_and_its_streams_go_on(nodes: NodeFleet, expected: dict[str, str]) -> None:
    node = nodes.nodes[0]
    pid = node.engine.pid
    with streams(nodes.head, expected):
        node.engine.kill()
    why = f"its engine process {pid} exited: it was ended by SIGKILL"
    until(lambda: why in nodes.head.log.read_text(), "the head says why it is lost")
    nodes.wait_for_replicas(2)
    assert node.engine.pid != pid
    assert node.process.poll() is None


@pytest.mark.long
def test_a_killed_server_leaves_no_engine_behind(nodes: NodeFleet, expected: dict[str, str]) -> None:
    node = nodes.nodes[1]
    processes = psutil.Process(node.process.pid).children(recursive=True)
    with streams(nodes.head, expected):
        node.kill()
    until(lambda: not any(process.is_running() for process in processes), "its engine has ended with it")
    names = set(nodes.head.replicas())
    successor = nodes.replace_node(node)
    nodes.wait_for_replicas(2)
    assert set(nodes.head.replicas()) == names
    until(lambda: successor.says("Replica 0 of this node is replica 0."), "it says by which name users know it")


@pytest.mark.long
def test_ctrl_c_tells_a_nodes_engines_too_and_its_streams_finish(nodes: NodeFleet, expected: dict[str, str]) -> None:
    node, before = nodes.nodes[1], nodes.head.total(MOVES)
    with streams(nodes.head, expected):
        os.killpg(node.process.pid, signal.SIGINT)
    assert nodes.head.total(MOVES) == before
    assert node.process.wait(STOP_S) == 0
    nodes.replace_node(node)
    nodes.wait_for_replicas(2)


@pytest.mark.long
def test_a_stopped_engine_is_left_and_taken_back(nodes: NodeFleet, expected: dict[str, str]) -> None:
    engine = nodes.nodes[0].engine
    with streams(nodes.head, expected):
        engine.send_signal(signal.SIGSTOP)
        try:
            nodes.wait_for_replicas(1)
        finally:
            engine.resume()
    nodes.wait_for_replicas(2)
    assert nodes.nodes[0].engine.pid == engine.pid


@pytest.mark.both_front_ends(newest=True)
def test_a_stopped_server_is_left_and_taken_back(nodes: NodeFleet, expected: dict[str, str]) -> None:
    node = nodes.nodes[0]
    server, engine = psutil.Process(node.process.pid), node.engine
    with streams(nodes.head, expected):
        server.suspend()
        try:
            nodes.wait_for_replicas(1)
        finally:
            server.resume()
    nodes.wait_for_replicas(2)
    assert node.engine.pid == engine.pid


@pytest.mark.both_front_ends(newest=True)
def test_a_killed_coordinator_is_replaced_and_nobody_notices(nodes: NodeFleet, expected: dict[str, str]) -> None:
    engines = [node.engine.pid for node in nodes.nodes]
    with streams(nodes.head, expected):
        coordinator = until(lambda: nodes.coordinator, "the head runs a coordinator")
        coordinator.kill()
        until(lambda: not coordinator.is_running(), "the coordinator is gone")
        assert nodes.head.replicas_up() == 2
    until(lambda: nodes.coordinator, "the coordinator is back")
    assert [node.engine.pid for node in nodes.nodes] == engines
    assert nodes.head.health() == 200


@pytest.mark.both_front_ends(newest=True)
def test_a_killed_head_finds_its_replicas_again_with_nothing_left_running(
    nodes: NodeFleet, expected: dict[str, str]
) -> None:
    engines = [node.engine.pid for node in nodes.nodes]
    with Load(nodes.head) as load:
        lost = [load.send(TOKENS, stream=True) for _ in range(STREAMS)]
        assert all(outcome.started.wait(60) for outcome in lost)
        nodes.head.kill()
    nodes.restart_head()
    nodes.head.wait()
    nodes.wait_for_replicas(2)
    assert [node.engine.pid for node in nodes.nodes] == engines
    with streams(nodes.head, expected):
        pass
    until(lambda: set(nodes.head.by_engine(RUNNING).values()) == {0}, "orphaned requests have ended", START_S)
