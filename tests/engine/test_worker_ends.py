"""A worker of an engine is ended by a signal: every log on the way says by which."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import QUICK_HEARTBEATS
from .nodes import NodeFleet
from .server import START_S, WORKERS, until

WORKER_ENDED = "the engine reported its own death: its worker VllmWorker-0 was ended by SIGILL"


@pytest.fixture
def fleet_of_one(tiny_model: Path, logs: Path, make_room: None) -> Iterator[NodeFleet]:
    """A head without engines and one node whose engine has its worker in a process of its own."""
    running = NodeFleet(tiny_model, logs / "worker-ends.log", nodes=1, flags=(*QUICK_HEARTBEATS, *WORKERS))
    try:
        running.wait_for_replicas(1)
        yield running
    finally:
        running.stop()


@pytest.mark.long
def test_the_logs_of_node_and_head_name_the_signal_that_ended_a_worker(fleet_of_one: NodeFleet) -> None:
    [node], head = fleet_of_one.nodes, fleet_of_one.head
    [worker] = [child for child in node.engine.children() if child.name().startswith("VLLM::Worker")]
    worker.send_signal(signal.SIGILL)
    until(lambda: node.says(WORKER_ENDED), "the node's log says how the worker ended", START_S)
    until(lambda: WORKER_ENDED in head.log.read_text(), "so does the head's", START_S)
