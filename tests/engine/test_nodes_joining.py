"""Nodes that may not join, or cannot: both ends say why, and nobody else notices.

The head and its node are real; most of those that are turned away have simulated engines behind the same server, which
start in seconds.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.free_ports import free_port
from vllm_omni_plugin.coordinator import OmniCoordClientForStage
from vllm_omni_plugin.curve import Secrets

from .load import Load
from .lora import make_lora
from .nodes import Node, NodeFleet
from .server import START_S, serve_command, serve_environment, until, write_secret

NEVER = "tcp://127.0.0.1:9"
"""The discard port of this machine, where nobody listens."""

SERVE = tuple(serve_command(Path())[:2])
OTHER_LENGTH = "max model length: head has 1024, replica 512"

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
def start_sim(served: NodeFleet) -> Iterator[StartSim]:
    started: list[Node] = []

    def start(*flags: str, join: tuple[str, ...] | None = None, program: tuple[str, ...] | None = None) -> Node:
        started.append(served.start_sim(*flags, join=join, program=program))
        return started[-1]

    yield start
    for node in started:
        node.stop()


@pytest.mark.parametrize(
    ("program", "flags", "why"),
    [
        (SERVE, ("--headless", "--max-model-len", "512"), OTHER_LENGTH),
        pytest.param(None, ("--omni-stage-id", "1"), "stage: the head has 0, replica 1", marks=pytest.mark.long),
    ],
)
def test_a_node_of_another_configuration_ends_before_it_starts_an_engine(
    start_sim: StartSim, program: tuple[str, ...] | None, flags: tuple[str, ...], why: str
) -> None:
    node = start_sim(*flags, program=program)
    assert why in error_of(node, os.EX_TEMPFAIL)
    assert not node.says("EngineCore")


@pytest.mark.long
def test_doctor_says_the_same_without_a_start(served: NodeFleet, tiny_model: Path) -> None:
    doctor = str(Path(sys.executable).with_name("vllm-omni-plugin"))
    against = ("--against", "{}:{}".format(*served.master), "--omni-secret-file", str(served.secret))
    flags = (*serve_command(tiny_model)[2:], *against, "--enable-lora", "--headless", "--max-model-len", "512")
    done = subprocess.run(
        [doctor, "doctor", *flags], env=serve_environment(), capture_output=True, text=True, timeout=START_S
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("error ")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1
    assert OTHER_LENGTH in errors[0]
    assert "head: it answers" in done.stdout


@pytest.mark.long
def test_a_node_with_other_files_of_an_adapter_joins_when_nobody_can_ask_for_it_any_more(
    served: NodeFleet, start_sim: StartSim, tmp_path: Path
) -> None:
    adapter = make_lora(tmp_path / "lora", seed=1)
    loaded, unloaded = {"lora_name": "changing", "lora_path": str(adapter)}, {"lora_name": "changing"}
    with served.head.http(60.0) as http:
        http.post("/v1/load_lora_adapter", json=loaded).raise_for_status()
        # As if the late node had a disk of its own.
        shutil.rmtree(adapter)
        make_lora(adapter, seed=2, rank=4)
        start_sim()
        told = f"LoRA adapter 'changing': the files at {adapter} have the digest "
        until(lambda: told in served.head.log.read_text(), "the head says why", START_S)
        assert served.head.replicas_up() == 2
        http.post("/v1/unload_lora_adapter", json=unloaded).raise_for_status()
    served.wait_for_replicas(3)


@pytest.mark.long
def test_another_secret_is_refused_and_both_ends_say_so(served: NodeFleet, start_sim: StartSim, tmp_path: Path) -> None:
    wrong = write_secret(tmp_path / "wrong")
    node = start_sim("--omni-join-timeout", "1", join=(*served.join[:-1], str(wrong)))
    assert "no head answered at tcp://" in error_of(node, 1)
    assert node.says("refused secret")
    assert node.says("--omni-secret-file")
    until(lambda: "Refused " in served.head.log.read_text(), "the head's coordinator says whom it refused")


@pytest.mark.long
def test_a_node_without_a_head_ends_with_one_clear_line(start_sim: StartSim) -> None:
    port = str(free_port())
    node = start_sim("--omni-join-timeout", "1", join=("-oma", "127.0.0.1", "-omp", port))
    assert f"no head answered at tcp://127.0.0.1:{port} within 1 s" in error_of(node, 1)


@pytest.mark.long
def test_an_exhausted_port_range_ends_the_node_with_the_flags_name(start_sim: StartSim) -> None:
    first = free_port()
    node = start_sim("--omni-replica-ports", f"{first}-{first}")
    assert "--omni-replica-ports" in error_of(node, 1)


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
