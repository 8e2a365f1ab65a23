"""The image, as the chart and the Compose file run it: any user, an init, and a root file system that is read-only."""

import json
from typing import Any

import pytest
import yaml

from tests.project.source_tree import ROOT

from .chart import render, values
from .test_chart import HEADS, NODE
from .test_compose import FILE as COMPOSE_FILE
from .test_compose import interpolated

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
WRITABLE = {"/home/vllm", "/tmp"}


def instructions() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest)
    return found


def test_the_server_runs_below_an_init_that_signals_it_alone() -> None:
    (entry_point,) = instructions()["ENTRYPOINT"]
    init, *options, end, program, subcommand = json.loads(entry_point)
    assert (init, options, end) == ("dumb-init", ["--single-child"], "--")
    assert (program, subcommand) == ("vllm", "serve")
    assert "dumb-init==" in instructions()["RUN"][0]


def test_any_user_of_group_0_has_a_home_and_a_name() -> None:
    found = instructions()
    user, _, group = found["USER"][-1].partition(":")
    assert int(user) > 0
    assert group == "0"
    (environment,) = found["ENV"]
    assert dict(word.split("=") for word in environment.split()) == {"HOME": "/home/vllm", "USER": "vllm"}
    assert f"chown -R {user}:0 /home/vllm && chmod -R g=u /home/vllm" in found["RUN"][0]


@pytest.mark.parametrize("workload", [*HEADS, NODE])
def test_pods_of_the_chart_keep_the_entry_point_and_cannot_write_to_the_image(workload: tuple[str, str]) -> None:
    pod = render(values()).pod(*workload)
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod["containers"], *pod["initContainers"]):
        limits = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == limits
    (server,) = pod["containers"]
    assert "command" not in server
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    assert {mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] in empty} >= WRITABLE


def test_openshift_may_choose_the_group() -> None:
    assert "fsGroup" not in render(values(securityContext={"fsGroup": None})).pod(*NODE)["securityContext"]


def test_compose_keeps_the_entry_point_and_cannot_write_to_the_image() -> None:
    services: dict[str, Any] = yaml.safe_load(interpolated(COMPOSE_FILE.read_text()))["services"]
    for service in services.values():
        assert "entrypoint" not in service
        assert service["read_only"] is True
        assert service["user"].endswith(":0")
        # Docker mounts a tmpfs as noexec, and compiled kernels are loaded from it.
        folder, _, options = service["tmpfs"].partition(":")
        assert "exec" in options.split(",")
        assert {folder, *(volume.partition(":")[2] for volume in service["volumes"])} == WRITABLE
