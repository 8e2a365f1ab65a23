"""Nodes on a Ray cluster of several machines, with real engines: a machine is lost under streams."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.fakes.free_ports import free_port

from .load import Load
from .ray_cluster import HAS_RAY, NO_TOKEN, RayCluster
from .server import MOVES, START_S, ServeProcess, Server, serve_command, until, write_secret
from .test_nodes_faults import STREAMS, TOKENS, streams

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_RAY, reason="needs Ray, which `make test-long` installs"),
]
NODES = 2


class RayFleet:
    """A head without engines, and nodes on a Ray cluster. A context manager; leaving it ends them."""

    def __init__(self, model: Path, folder: Path, ray: RayCluster, *arguments: str) -> None:
        self.ray = ray
        secret = write_secret(folder / "fleet.secret")
        join = ("-oma", "127.0.0.1", "-omp", str(free_port()), "--omni-secret-file", str(secret))
        self.head = Server(model, folder / "head.log", *join, "--omni-dp-size-local", "0")
        program = str(Path(sys.executable).with_name("vllm-omni-plugin"))
        up = [program, "ray", "up", "--num-gpus", "0", "--address", ray.address, *serve_command(model)[2:]]
        self.up = ServeProcess([*up, "--url", self.head.url, *join, *arguments], folder / "up.log", **NO_TOKEN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.up, self.head):
            process.stop()

    def wait_for_replicas(self, count: int) -> None:
        """Return when so many serve."""
        until(self._answers, f"the head answers; logs: {self.up.log}, {self.head.log}", 2 * START_S)
        until(lambda: self.head.replicas_up() == count, f"{count} nodes serve; log: {self.up.log}", 2 * START_S)

    def has_said(self, text: str) -> bool:
        return text in self.up.log.read_text()

    def nodes(self) -> list[psutil.Process]:
        return [node for machine in self.ray.machines if machine.process.poll() is None for node in machine.nodes()]

    def _answers(self) -> bool:
        assert self.up.process.poll() is None, self.up.log.read_text()[-4000:]
        return self.head.health() == 200


@pytest.fixture(scope="module")
def ray(make_room: None) -> Iterator[RayCluster]:
    """One machine more than there are nodes."""
    short = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    with short as folder, RayCluster(Path(folder), NODES + 1) as ray:
        yield ray


@pytest.fixture(scope="module")
def fleet(ray: RayCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with RayFleet(tiny_model, tmp_path_factory.mktemp("fleet"), ray, "--replicas", str(NODES)) as fleet:
        fleet.wait_for_replicas(NODES)
        yield fleet


def test_a_lost_machine_costs_no_token_and_its_node_is_replaced(fleet: RayFleet) -> None:
    lost = next(machine for machine in fleet.ray.machines if machine.nodes())
    with streams(fleet.head, {}):
        killed = lost.lose()
    # Those that nobody has waited for yet still count as running.
    until(lambda: not any(process.is_running() for process in killed), "all of it is gone", START_S)
    assert fleet.head.total(MOVES) > 0
    until(lambda: fleet.has_said("node 2: runs on"), "the node is replaced", START_S)
    fleet.wait_for_replicas(NODES)
    assert len(fleet.nodes()) == NODES


def test_the_end_of_the_command_drains_every_node(fleet: RayFleet) -> None:
    fleet.wait_for_replicas(NODES)
    nodes = fleet.nodes()
    assert len(nodes) == NODES
    before = fleet.head.total(MOVES)
    with Load(fleet.head) as load:
        sent = [load.send(TOKENS, stream=True, prompt=f"number {number}") for number in range(STREAMS)]
        assert all(outcome.started.wait(60) for outcome in sent)
        fleet.up.tell_to_end()
    assert [outcome for outcome in sent if not outcome.finished_whole] == []
    assert fleet.head.total(MOVES) == before
    assert fleet.up.process.wait(START_S) == 0
    assert [node for node in nodes if node.is_running()] == []


def test_a_queue_brings_a_node_and_none_outlives_a_killed_command(
    ray: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--max-replicas", "2", "--target-wait", "0.5", "--max-num-seqs", "1")
    with RayFleet(tiny_model, tmp_path, ray, *options) as fleet:
        fleet.wait_for_replicas(1)
        assert not fleet.has_said("node 1")
        with Load(fleet.head) as load:
            sent = [load.send(TOKENS, stream=True, prompt=f"number {number}") for number in range(2 * STREAMS)]
            until(lambda: fleet.has_said("node 1: runs on"), "a node is added", START_S)
        assert [outcome for outcome in sent if not outcome.finished_whole] == []
        fleet.wait_for_replicas(2)
        nodes = fleet.nodes()
        assert len(nodes) == 2
        fleet.up.kill()
        until(lambda: not any(node.is_running() for node in nodes), "Ray ends the nodes", START_S)
