"""A replica of two tensor-parallel workers on a headless node, of which one is ended by a signal."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .load import Load
from .nodes import NodeFleet
from .server import WORKERS, until

WORKER_ENDED = re.compile(r"the engine reported its own death: its worker VllmWorker-[01] was ended by SIGILL")
FLAGS = ("--tensor-parallel-size", "2", *WORKERS)


@pytest.fixture
def pair(tiny_model: Path, logs: Path, make_room: None) -> Iterator[NodeFleet]:
    """A head without engines and one node whose engine has two workers."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with NodeFleet(
        tiny_model,
        logs / "tensor-parallel.log",
        nodes=1,
        flags=FLAGS,
        head_flags=("--omni-replica-wait", "240"),
        environment=cores,
    ) as running:
        yield running


@pytest.mark.long
def test_it_serves_dies_with_all_its_workers_for_a_reason_that_both_logs_name_and_comes_back(pair: NodeFleet) -> None:
    node = pair.nodes[0]
    workers = [child for child in node.engine.children() if child.name().startswith("VLLM::Worker")]
    assert len(workers) == 2
    with Load(pair.head) as load:
        first = load.send(30, stream=True, temperature=0)
    with Load(pair.head) as load:
        held = load.send(900, stream=True, temperature=0)
        assert held.started.wait(60)
        workers[0].send_signal(signal.SIGILL)
        until(lambda: not any(psutil.pid_exists(worker.pid) for worker in workers), "its workers have ended")
    assert first.finished_whole
    assert held.finished_whole, "the only replica came back within the time that requests wait"
    assert held.text.startswith(first.text)
    assert [log.name for log in (node.log, pair.head.log) if not WORKER_ENDED.search(log.read_text())] == []
