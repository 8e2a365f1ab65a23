"""The probe of nodes, as Kubernetes runs it, against a fake head."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.free_ports import free_port
from tests.fakes.http_server import FakeServer
from vllm_omni_plugin.orchestrator.pool.pool_member import NO_HEAD, OTHER_GENERATION

from .chart import CHART, EVERYTHING, render, values

ADDRESS = "10.1.2.3"


def replica(status: str, address: str = ADDRESS) -> dict[str, Any]:
    return {"status": status, "input_addr": f"tcp://{address}:20001" if address else ""}


def other_generation(unused: str = "") -> dict[str, Any]:
    return replica(OTHER_GENERATION) | {"other_generation": f"revision: head has a, replica b{unused}"}


@pytest.fixture
def head() -> Iterator[FakeServer]:
    with FakeServer() as head:
        yield head


def probe(
    port: int, replicas: int = 1, address: str = ADDRESS, **environment: str
) -> "subprocess.CompletedProcess[str]":
    own = {"POD_IP": address, "OMNI_HEAD_URL": f"http://127.0.0.1:{port}", "OMNI_REPLICAS": str(replicas)}
    # The proxy must not be used.
    environment |= {"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:9"} | own
    command = [sys.executable, "-S", "-E", CHART / "files" / "serves.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize(
    ("replicas", "wanted", "serves"),
    [
        pytest.param([], 1, False, id="loading"),
        pytest.param([replica("up", "10.1.2.4")], 1, False, id="another node's"),
        pytest.param([replica("up", "10.1.2.30")], 1, False, id="an address that begins alike"),
        pytest.param([replica("up", "")], 1, False, id="never served"),
        pytest.param([replica("up")], 1, True, id="serves"),
        pytest.param([replica("draining")], 1, True, id="drained by an operator"),
        pytest.param([replica("error")], 1, False, id="hangs"),
        pytest.param([replica("down")], 1, False, id="lost"),
        pytest.param([other_generation()], 1, True, id="serves for heads of another generation than the one asked"),
        pytest.param([other_generation(f"; {NO_HEAD}")], 1, False, id="of a generation without a head"),
        pytest.param([replica("up"), replica("error")], 2, False, id="one of two"),
        pytest.param([replica("up"), replica("up")], 2, True, id="both of two"),
        pytest.param(
            [replica("up", "10.1.2.4") | {"machines": ["10.1.2.4", ADDRESS]}], 1, True, id="one of several machines"
        ),
        pytest.param(
            [replica("up", "10.1.2.4") | {"machines": ["10.1.2.4"]}], 1, False, id="machine that has not come"
        ),
    ],
)
def test_a_node_is_ready_if_a_head_lists_its_engines_as_serving(
    head: FakeServer, replicas: list[dict[str, Any]], wanted: int, serves: bool
) -> None:
    head.answers["GET", "/omni/replicas"] = (200, {"replicas": replicas})
    done = probe(head.server_port, wanted)
    assert (done.returncode == 0) is serves, done.stderr
    assert (done.stderr == "") is serves


def test_an_unreachable_head_is_reported() -> None:
    done = probe(free_port())
    assert done.returncode == 1
    assert done.stderr.startswith("no head answers")


def test_the_chart_runs_this_file_with_what_it_needs() -> None:
    manifests = render(values(**EVERYTHING))
    (node,) = manifests.pod("StatefulSet", "fleet-llama-node")["containers"]
    program, path = node["readinessProbe"]["exec"]["command"]
    folder = next(mount["mountPath"] for mount in node["volumeMounts"] if mount["name"] == "probe")
    assert (program, path) == ("python3", f"{folder}/serves.py")
    text = manifests.get("ConfigMap", "fleet-probe")["data"]["serves.py"]
    assert text.strip() == (CHART / "files" / "serves.py").read_text().strip()
    environment = {variable["name"]: variable.get("value") for variable in node["env"]}
    service = manifests.get("Service", "fleet-llama")
    assert environment["OMNI_HEAD_URL"] == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert environment["OMNI_REPLICAS"] == "1"
    assert {"POD_IP", "VLLM_API_KEY"} <= environment.keys()
