"""A node whose cable is cut: its streams go on elsewhere, and it is back when the cable is mended."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import HEARTBEAT_TIMEOUT_S, QUICK_HEARTBEATS
from .load import no_stream_suffers, undisturbed
from .namespaces import NEEDS_NAMESPACES, Cable
from .nodes import NodeFleet
from .server import FRONT_ENDS, IN_FLIGHT, until

TOKENS = 900
STREAMS = 4

pytestmark = [
    pytest.mark.both_front_ends,
    pytest.mark.long,
    NEEDS_NAMESPACES,
]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, logs: Path, cable: Cable, make_room: None, front_end: str) -> Iterator[NodeFleet]:
    """A head with one local replica at one end of the cable, a node at the other."""
    log, environment = logs / f"cable-{front_end}.log", FRONT_ENDS[front_end]
    with NodeFleet(
        tiny_model, log, nodes=1, local=1, cable=cable, flags=QUICK_HEARTBEATS, environment=environment
    ) as running:
        yield running


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
    texts = undisturbed(pair.head, STREAMS, TOKENS)
    with no_stream_suffers(pair.head, texts, TOKENS) as load:
        cable.cut()
        mend_at = time.monotonic() + seconds
        try:
            until(lambda: pair.head.replicas_up() == 1, "the cut is noticed")
            load.wait()
            # The fault itself: the cable stays cut for so long.
            time.sleep(max(0.0, mend_at - time.monotonic()))
        finally:
            cable.mend()
    pair.wait_for_replicas(2)
    assert pair.nodes[0].engine.pid == engine
    assert set(pair.head.by_replica(IN_FLIGHT).values()) == {0}
