"""An operator's commands, over the real command line and HTTP routes, on a fleet of nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .load import Load
from .nodes import NodeFleet
from .server import START_S, until

REQUESTS = 6


def replicas(nodes: NodeFleet, *args: str) -> str:
    """What `vllm-omni-plugin replicas ...` prints."""
    tool = str(Path(sys.executable).with_name("vllm-omni-plugin"))
    command = [tool, "replicas", *args, "--url", nodes.head.url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def listed(nodes: NodeFleet) -> dict[str, dict[str, object]]:
    return {replica["id"]: replica for replica in json.loads(replicas(nodes, "ls", "--json"))["replicas"]}


def test_a_drained_replica_gets_nothing_until_it_is_resumed(nodes: NodeFleet) -> None:
    drained, other = sorted(listed(nodes))
    assert [line.split()[0] for line in replicas(nodes, "ls").splitlines()[1:]] == [drained, other]
    replicas(nodes, "drain", drained)
    try:
        assert listed(nodes)[drained]["status"] == "draining"
        before = listed(nodes)
        with Load(nodes.head) as load:
            answers = [load.send(20, stream=True) for _ in range(REQUESTS)]
        after = listed(nodes)
    finally:
        replicas(nodes, "resume", drained)
    assert all(answer.finished_whole for answer in answers)
    assert after[drained]["assigned"] == before[drained]["assigned"]
    assert after[other]["assigned"] == before[other]["assigned"] + REQUESTS  # type: ignore[operator]
    assert listed(nodes)[drained]["status"] == "up"


@pytest.mark.long
def test_a_deleted_replica_leaves_its_requests_to_others_and_ends_its_node(nodes: NodeFleet) -> None:
    before = set(listed(nodes))
    sim = nodes.start_sim("--tokens-per-second", "20")
    try:
        nodes.wait_for_replicas(3)
        (late,) = set(listed(nodes)) - before
        with nodes.head.operator() as http:
            assert http.delete(f"/omni/replicas/{late}").status_code == 204
            assert sim.process.wait(START_S) == 0
            until(lambda: set(listed(nodes)) == before, "it is no longer listed")
            assert http.delete(f"/omni/replicas/{late}").status_code == 404
    finally:
        sim.stop()
