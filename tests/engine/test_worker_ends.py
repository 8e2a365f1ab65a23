"""A worker of an engine is ended by a signal: every log on the way says by which."""

import signal

import psutil
import pytest

from .nodes import NodeFleet
from .server import START_S, until

WORKER_ENDED = "the engine reported its own death: its worker VllmWorker-0 was ended by SIGILL"


def worker_of(engine: psutil.Process) -> psutil.Process:
    """The one worker of an engine, beside multiprocessing's own helper."""
    [worker] = [child for child in engine.children() if not any("resource_tracker" in word for word in child.cmdline())]
    return worker


@pytest.mark.long
def test_the_logs_of_node_and_head_name_the_signal_that_ended_a_worker(nodes: NodeFleet) -> None:
    node = nodes.nodes[0]
    worker_of(node.engine).send_signal(signal.SIGILL)
    until(lambda: node.says(WORKER_ENDED), "the node's log says how the worker ended", START_S)
    until(lambda: WORKER_ENDED in nodes.head.log.read_text(), "so does the head's", START_S)
    nodes.wait_for_replicas(2)
