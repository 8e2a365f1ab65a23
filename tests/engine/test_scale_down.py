"""What an autoscaler does: more nodes under load, and fewer again, each told to end by SIGTERM; no request fails."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import render
from tests.fakes.free_ports import free_port

from .load import constant_load
from .nodes import Node
from .server import ASSIGNMENTS, FRONT_ENDS, RUST, START_S, Server, serve_command, until, write_secret

CLIENTS = 12
TOKENS = 100
"""A second's work of a simulated engine."""
IN_TIME_S = 2 * START_S
"""Up to six nodes start together."""


def values(front_end: str) -> dict[str, Any]:
    """Those of the chart."""
    head = {"tag": "v1-cpu", "rustFrontend": front_end == RUST}
    model = {"name": "llama", "modelURL": "llama", "repository": "registry/vllm", "tag": "v1", "headSpec": head}
    key = {"adminKey": "in a file of its own here"} if front_end == RUST else {}
    return {"servingEngineSpec": {"fleetSecret": "in a file of its own here", "modelSpec": [model], **key}}


class SimulatedFleet:
    """What the Helm chart runs, with its arguments, as processes: two heads, and nodes with a simulated engine."""

    def __init__(self, model: Path, folder: Path, keys: Path, front_end: str) -> None:
        self._model = model
        self._folder = folder
        self._secret = write_secret(folder / "fleet.secret")
        self._port = free_port()
        self._keys = keys
        self._chart = render(values(front_end))
        self._started = 0
        self.nodes: list[Node] = []
        self.heads = [
            Server(
                model,
                folder / f"{name}.log",
                *self._arguments("Deployment", f"fleet-llama-{name}"),
                **FRONT_ENDS[front_end],
            )
            for name in ("head", "heads")
        ]

    def scale(self, count: int) -> None:
        """Start nodes, or tell the newest to end, all at once; return when as many serve, and the others have ended."""
        gone = self.nodes[count:]
        self.nodes = [*self.nodes[:count], *(self._new_node() for _ in range(len(self.nodes), count))]
        for node in gone:
            node.process.terminate()
        assert [node.process.wait(120) for node in gone] == [0] * len(gone)
        for head in self.heads:
            until(lambda head=head: head.health() == 200, "a head serves", IN_TIME_S)
            until(lambda head=head: head.replicas_up() == count, f"{count} replicas serve", IN_TIME_S)

    def stop(self) -> None:
        for process in (*self.nodes, *self.heads):
            process.tell_to_end()
        for process in (*self.nodes, *self.heads):
            process.stop()

    def counted(self, name: str) -> float:
        """The sum of a metric over replicas and heads."""
        return sum(head.total(name) for head in self.heads)

    def asked(self) -> set[str]:
        """The replicas that have got a request from a head."""
        return {name for head in self.heads for name, requests in head.by_replica(ASSIGNMENTS).items() if requests}

    def _arguments(self, kind: str, name: str) -> list[str]:
        """Those of the chart behind the model, with the addresses, port and files that there are here."""
        here = {
            "fleet-llama-fleet": "127.0.0.1",
            "$(POD_IP)": "127.0.0.1",
            "7500": str(self._port),
            "/run/vllm-omni/fleet.secret": str(self._secret),
            "/run/vllm-omni/admin.keys": str(self._keys),
        }
        words = [here.get(word, word) for word in self._chart.command(kind, name)[3:]]
        # A head of the tests has them already.
        for flag in {"--host", "--port", "--omni-admin-port"}.intersection(words):
            del words[words.index(flag) : words.index(flag) + 2]
        return words

    def _new_node(self) -> Node:
        self._started += 1
        program = str(Path(sys.executable).with_name("vllm-omni-plugin"))
        arguments = self._arguments("StatefulSet", "fleet-llama-node")
        command = [program, "sim", *serve_command(self._model)[2:], *arguments]
        return Node(command, self._folder / f"node-{self._started}.log")


@pytest.mark.both_front_ends
@pytest.mark.long
@pytest.mark.timeout(900)
def test_nodes_that_come_and_go_under_load_cost_no_request(
    tiny_model: Path, tmp_path: Path, admin_keys: Path, front_end: str
) -> None:
    fleet = SimulatedFleet(tiny_model, tmp_path, admin_keys, front_end)
    try:
        fleet.scale(2)
        with constant_load(fleet.heads, CLIENTS, TOKENS) as outcomes:
            for count in (8, 3):
                fleet.scale(count)
                asked = len(outcomes)
                until(lambda asked=asked: len(outcomes) > asked + 4 * CLIENTS, f"{count} nodes answer", 120)
                if count == 8:
                    until(lambda: len(fleet.asked()) == 8, "each node gets a request", 120)
        assert [outcome for outcome in outcomes if not outcome.finished_whole] == []
        assert fleet.counted("vllm_omni_fleet:request_moves_total") == 0
    finally:
        fleet.stop()
