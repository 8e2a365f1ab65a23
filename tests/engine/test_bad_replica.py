"""A replica whose engine says what nobody can use: it is named and taken out, and the head and the others serve on."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .load import Load
from .nodes import Node, NodeFleet
from .server import RUST, START_S, until

BAD_SIM = """
import sys

import torch
from vllm.v1.outputs import LogprobsLists

from vllm_omni_plugin import cli
from vllm_omni_plugin.vllm_api.codecs import sim_protocol

own_output = sim_protocol.output


def output(*args):
    made = own_output(*args)
    made.new_logprobs = LogprobsLists(torch.ones(1, 0, dtype=int), torch.ones(1, 0), torch.ones(1, dtype=int))
    return made


if sys.argv[1] == "outputs":
    sim_protocol.output = output
else:
    sim_protocol.ready_response = lambda *args: b"garbage"
sys.exit(cli.main(["sim", *sys.argv[2:]]))
"""
"""`vllm-omni-plugin sim` whose engines say something wrong."""

StartBad = Callable[[str], Node]


@pytest.fixture
def start_bad(nodes: NodeFleet, tmp_path: Path) -> Iterator[StartBad]:
    """Starts a replica of which the outputs, or the ready response, cannot be used; it ends with the test."""
    started: list[Node] = []

    def start(what: str) -> Node:
        script = tmp_path / "bad_sim.py"
        script.write_text(BAD_SIM)
        started.append(nodes.start_sim(program=(sys.executable, str(script), what)))
        return started[-1]

    yield start
    for node in started:
        node.stop()
    nodes.wait_for_replicas(2)


@pytest.mark.both_front_ends
@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("outputs", "is lost (its output for request "),
        pytest.param("ready", "cannot be attached to: its engine's ready response is invalid", marks=pytest.mark.long),
    ],
)
def test_the_head_serves_on_and_names_the_replica(
    nodes: NodeFleet, start_bad: StartBad, what: str, complaint: str, front_end: str
) -> None:
    start_bad(what)
    if what == "outputs":
        nodes.wait_for_replicas(3)
    else:
        until(lambda: complaint in nodes.head.log.read_text(), "the head refuses it", START_S)
    with Load(nodes.head) as load:
        answers = [load.send(12, stream=True, prompt=f"count {number}") for number in range(12)]
    failed = [answer for answer in answers if not answer.finished_whole]
    if what == "outputs":
        assert 0 < len(failed) < 12, answers
        unusable = "The model's output could not be processed: AssertionError"
        error = "Internal server error" if front_end == RUST else unusable
        assert all(error in str(answer.errors) for answer in failed)
    else:
        assert failed == []
    until(lambda: complaint in nodes.head.log.read_text(), "the head says why")
    assert nodes.head.health() == 200
