"""A replica whose engine says what nobody can use: it is named and taken out, and the head and the others serve on."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .load import Load
from .nodes import Node, NodeFleet
from .server import RUST, until

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


sim_protocol.output = output
sys.exit(cli.main(["sim", *sys.argv[1:]]))
"""
"""`vllm-omni-plugin sim` whose outputs cannot be used."""


@pytest.mark.both_front_ends
def test_the_head_serves_on_and_names_the_replica(
    nodes: NodeFleet, start_sim: Callable[..., Node], tmp_path: Path, front_end: str
) -> None:
    (script := tmp_path / "bad_sim.py").write_text(BAD_SIM)
    start_sim(program=(sys.executable, str(script)))
    nodes.wait_for_replicas(3)
    with Load(nodes.head) as load:
        answers = [load.send(12, stream=True, prompt=f"count {number}") for number in range(12)]
    failed = [answer for answer in answers if not answer.finished_whole]
    assert 0 < len(failed) < 12, answers
    unusable = "The model's output could not be processed: AssertionError"
    error = "Internal server error" if front_end == RUST else unusable
    assert all(error in str(answer.errors) for answer in failed)
    until(lambda: "is lost (its output for request " in nodes.head.log.read_text(), "the head says why")
    assert nodes.head.health() == 200
