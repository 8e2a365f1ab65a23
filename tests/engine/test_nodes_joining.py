"""Nodes that may not join, or cannot: both ends say why, and nobody else notices.

The head and its node are real; most of those that are turned away have simulated engines behind the same server, which
start in seconds.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_plugin.coordinator import OmniCoordClientForStage
from vllm_omni_plugin.curve import Secrets

from .load import Load
from .nodes import Node, NodeFleet
from .server import START_S, serve_command, until, write_secret

NEVER = "tcp://127.0.0.1:9"
"""The discard port of this machine, where nobody listens."""


pytestmark = pytest.mark.both_front_ends

StartSim = Callable[..., Node]


def error_of(node: Node, code: int) -> str:
    """The one line with which a node ends, and its exit code."""
    assert node.process.wait(START_S) == code
    (line,) = [line for line in node.log.read_text().splitlines() if re.match(r"vllm[\w -]*: error: ", line)]
    return line


@pytest.fixture
def served(nodes: NodeFleet) -> Iterator[NodeFleet]:
    """A head and its nodes; whoever else tried to join, they serve on."""
    yield nodes
    with Load(nodes.head) as load:
        answer = load.send(20, stream=True)
    assert answer.finished_whole


@pytest.fixture
def start_sim(served: NodeFleet, start_sim: StartSim) -> StartSim:
    return start_sim


def test_a_node_with_another_model_ends_before_it_starts_an_engine(
    start_sim: StartSim, tiny_model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    changed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (other / "config.json").write_text(json.dumps(config | changed))
    node = start_sim("--headless", model=other, program=tuple(serve_command(Path())[:2]))
    why = "model: head has local files of LlamaForCausalLM, replica local files of MistralForCausalLM"
    assert why in error_of(node, os.EX_TEMPFAIL)
    assert not node.says("EngineCore")


def test_a_node_of_another_generation_stays_shown_and_unused(served: NodeFleet, start_sim: StartSim) -> None:
    def others() -> list[Any]:
        with served.head.http() as http:
            listed = http.get("/omni/replicas").json()["replicas"]
        return [replica for replica in listed if replica["status"] == "other-generation"]

    node = start_sim("--max-model-len", "512")
    until(lambda: others(), "the head shows it", START_S)
    with Load(served.head) as load:
        answer = load.send(20, stream=True)
    assert answer.finished_whole
    (other,) = others()
    assert other["other_generation"] == "max model length: head has 1024, replica 512; no head of its kind"
    assert (other["assigned"], served.head.replicas_up()) == (0, 2)
    assert node.process.poll() is None


@pytest.mark.long
def test_another_secret_is_refused_and_both_ends_say_so(served: NodeFleet, start_sim: StartSim, tmp_path: Path) -> None:
    wrong = write_secret(tmp_path / "wrong")
    node = start_sim("--omni-join-timeout", "1", join=(*served.join[:-1], str(wrong)))
    assert "no head answered at tcp://" in error_of(node, 1)
    assert node.says("refused secret")
    assert node.says("--omni-secret-file")
    until(lambda: "Refused " in served.head.log.read_text(), "the head's coordinator says whom it refused")


def test_a_replica_that_cannot_be_reached_is_named_and_forgotten(served: NodeFleet) -> None:
    ghost = OmniCoordClientForStage(
        f"tcp://127.0.0.1:{served.master[1]}",
        NEVER,
        NEVER,
        0,
        control_addr=NEVER,
        secrets=Secrets.from_file(served.secret),
    )
    try:
        until(lambda: NEVER in served.head.log.read_text(), "the head says whom it cannot reach", START_S)
    finally:
        ghost.close()
    assert served.head.replicas_up() == 2


@pytest.mark.long
def test_who_claims_the_addresses_of_another_takes_nothing_down_for_good(served: NodeFleet) -> None:
    with served.head.http() as http:
        real = http.get("/omni/replicas").json()["replicas"][0]
    claimant = OmniCoordClientForStage(
        f"tcp://127.0.0.1:{served.master[1]}",
        real["input_addr"],
        real["output_addr"],
        0,
        control_addr=NEVER,
        secrets=Secrets.from_file(served.secret),
    )
    until(lambda: claimant.connected, "the claim is heard")
    claimant.close()
    served.wait_for_replicas(2)
