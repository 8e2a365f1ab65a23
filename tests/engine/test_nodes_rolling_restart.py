"""Every node is restarted in turn under load: no request fails, and those that come later know what the others know."""

from functools import partial
from pathlib import Path

import pytest

from .both_replicas import answers_of_both
from .load import Load, Outcome, constant_load
from .lora import make_lora
from .nodes import NodeFleet
from .server import MOVES, until

ADAPTER = "storyteller"
CLIENTS = 2
TOKENS = 60
LONG = 900
PAUSE_S = 3.0
"""Between a client's requests. Engines spin for a second after each, and on two cores a node needs one to start."""


def end_in_time(nodes: NodeFleet) -> None:
    """Restart the first node, with all the time that its requests need: they end where they are."""
    node, before = nodes.nodes[0], nodes.head.total(MOVES)
    node.process.terminate()
    assert node.process.wait(120) == 0
    assert nodes.head.total(MOVES) == before
    nodes.replace_node(node)


def end_at_once(nodes: NodeFleet) -> list[Outcome]:
    """Restart the node that is now first, by two signals in the middle of long streams: they move."""
    node, before = nodes.nodes[0], nodes.head.total(MOVES)
    with Load(nodes.head) as load:
        long = [load.send(LONG, stream=True) for _ in range(2 * CLIENTS)]
        assert all(outcome.started.wait(60) for outcome in long)
        # Its streams may else be over before the second signal.
        node.engine.suspend()
        node.process.terminate()
        until(lambda: node.says("drains: it stops when"), "it drains")
        node.process.terminate()
    assert node.process.wait(60) == 0
    assert nodes.head.total(MOVES) > before
    nodes.replace_node(node)
    return long


@pytest.mark.both_front_ends
@pytest.mark.long
def test_restarting_every_node_in_turn_loses_no_request_and_no_adapter(nodes: NodeFleet, tmp_path: Path) -> None:
    with nodes.head.http(60.0) as http:
        path = str(make_lora(tmp_path / "lora", seed=1))
        http.post("/v1/load_lora_adapter", json={"lora_name": ADAPTER, "lora_path": path}).raise_for_status()
    told = nodes.head.complete(model=ADAPTER)
    assert told != nodes.head.complete()
    with constant_load([nodes.head], CLIENTS, TOKENS, PAUSE_S) as outcomes:
        end_in_time(nodes)
        nodes.wait_for_replicas(2)
        long = end_at_once(nodes)
        nodes.wait_for_replicas(2)
    assert len(outcomes) > CLIENTS
    assert [outcome for outcome in (*outcomes, *long) if not outcome.finished_whole] == []
    assert set(answers_of_both(nodes.head, partial(nodes.head.complete, model=ADAPTER))) == {told}
