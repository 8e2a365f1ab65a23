"""A replica of two tensor-parallel workers on a headless node."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import QUICK_HEARTBEATS
from .load import Load
from .nodes import NodeFleet
from .server import WORKERS, until

FLAGS = ("--tensor-parallel-size", "2", *WORKERS, *QUICK_HEARTBEATS)


@pytest.fixture
def pair(tiny_model: Path, logs: Path, make_room: None) -> Iterator[NodeFleet]:
    """A head without engines and one node whose engine has two workers."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    running = NodeFleet(tiny_model, logs / "tensor-parallel.log", nodes=1, flags=FLAGS, environment=cores)
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.long
def test_a_tensor_parallel_replica_serves_dies_with_all_its_workers_and_comes_back(pair: NodeFleet) -> None:
    node = pair.nodes[0]
    workers = node.engine.children(recursive=True)
    with Load(pair.head) as load:
        first = load.send(30, stream=True, temperature=0)
    with Load(pair.head) as load:
        held = load.send(900, stream=True, temperature=0)
        assert held.started.wait(60)
        node.engine.kill()
        until(lambda: not any(psutil.pid_exists(worker.pid) for worker in workers), "its workers have ended")
    assert first.finished_whole
    assert held.finished_whole, "the only replica came back within the time that requests wait"
    assert held.text.startswith(first.text)
