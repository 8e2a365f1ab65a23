"""A node whose cable is cut: its streams go on elsewhere, and it is back when the cable is mended."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import HEARTBEAT_TIMEOUT_S, QUICK_HEARTBEATS
from .load import Load, Outcome
from .namespaces import Cable
from .nodes import NodeFleet
from .server import FRONT_ENDS, IN_FLIGHT, until

TOKENS = 900
STREAMS = 4

pytestmark = [
    pytest.mark.both_front_ends,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="making network namespaces takes root and iproute2"
    ),
]


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    with Cable() as cable:
        yield cable


@pytest.fixture(scope="module")
def pair(tiny_model: Path, logs: Path, cable: Cable, make_room: None, front_end: str) -> Iterator[NodeFleet]:
    """A head with one local replica at one end of the cable, a node at the other."""
    log, environment = logs / f"cable-{front_end}.log", FRONT_ENDS[front_end]
    running = NodeFleet(tiny_model, log, nodes=1, local=1, cable=cable, flags=QUICK_HEARTBEATS, environment=environment)
    try:
        yield running
    finally:
        running.stop()


def send(load: Load) -> list[Outcome]:
    return [load.send(TOKENS, stream=True, prompt=f"number {n}", temperature=0) for n in range(STREAMS)]


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(2.0, id="shorter than the timeout"),
        pytest.param(3 * HEARTBEAT_TIMEOUT_S, id="three timeouts"),
    ],
)
def test_streams_survive_a_cut(pair: NodeFleet, cable: Cable, seconds: float) -> None:
    pair.wait_for_replicas(2)
    engine = pair.nodes[0].engine.pid
    with Load(pair.head) as load:
        undisturbed = send(load)
    with Load(pair.head) as load:
        sent = send(load)
        assert all(outcome.started.wait(60) for outcome in sent)
        cable.cut()
        mend_at = time.monotonic() + seconds
        try:
            until(lambda: pair.head.replicas_up() == 1, "the cut is noticed")
            load.wait()
            # The fault itself: the cable stays cut for so long.
            time.sleep(max(0.0, mend_at - time.monotonic()))
        finally:
            cable.mend()
    assert [outcome for outcome in sent if not outcome.finished_whole] == []
    assert [outcome.text for outcome in sent] == [outcome.text for outcome in undisturbed]
    pair.wait_for_replicas(2)
    assert pair.nodes[0].engine.pid == engine
    assert set(pair.head.by_replica(IN_FLIGHT).values()) == {0}
