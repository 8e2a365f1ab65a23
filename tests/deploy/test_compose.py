"""The image and the Compose file, against Compose's JSON schema and the needs of heads and nodes."""

import json
import re
import tomllib
from importlib.metadata import distribution
from typing import Any

import jsonschema
import pytest
import yaml

from tests.project.source_tree import ROOT

from .chart import render, values
from .flags import KEEP_ALIVE, flags_of
from .test_chart import HEADS, NODE

FILE = ROOT / "deploy" / "compose" / "compose.yaml"
VARIABLES = {"MODEL": "org/llama"}
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolated(text: str) -> str:
    """Substitute variables like Compose, by VARIABLES or the default."""

    def value(match: "re.Match[str]") -> str:
        if match[0] == "$$":
            return "$"
        if match[1] in VARIABLES:
            return VARIABLES[match[1]]
        assert match[2] == "-", f"{match[1]} must be given: {match[3]}"
        return match[3]

    return _VARIABLE.sub(value, text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(interpolated(FILE.read_text()))
    return loaded


def command(service: dict[str, Any]) -> list[str]:
    """The command line of the container: the image's entry point runs `vllm serve`."""
    return ["vllm", "serve", *service["command"]]


def test_the_file_matches_composes_schema(compose: dict[str, Any]) -> None:
    name = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(distribution("check-jsonschema").locate_file(name).read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []
    compose["services"]["head"] |= {"stop_grace": "1s"}
    assert [error.message for error in validator.iter_errors(compose)] != []
    del compose["services"]["head"]["stop_grace"]


def test_the_plugin_accepts_every_command_line(compose: dict[str, Any]) -> None:
    head, node = (command(compose["services"][name]) for name in ("head", "node"))
    for words in (head, node):
        assert words[:3] == ["vllm", "serve", "org/llama"]
    assert flags_of(node)["--omni-master-address"] in compose["services"]
    shared = ("--max-model-len", "--dtype", "--omni-master-port", "--omni-secret-file")
    assert [flags_of(head)[name] for name in shared] == [flags_of(node)[name] for name in shared]


@pytest.mark.parametrize(("service", "flag"), [("head", "--shutdown-timeout"), ("node", "--omni-drain-timeout")])
def test_stop_grace_periods_exceed_the_requests_timeouts(compose: dict[str, Any], service: str, flag: str) -> None:
    grace = compose["services"][service]["stop_grace_period"]
    assert grace == f"{int(flags_of(command(compose['services'][service]))[flag]) + 30}s"


def test_idle_connections_to_the_head_last_longer_than_those_of_proxies(compose: dict[str, Any]) -> None:
    assert str(compose["services"]["head"]["environment"]["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) == KEEP_ALIVE


@pytest.mark.parametrize(("rust", "port"), [("0", 8000), ("1", 8001)])
def test_the_health_of_the_head_is_that_of_the_fleet(monkeypatch: pytest.MonkeyPatch, rust: str, port: int) -> None:
    monkeypatch.setitem(VARIABLES, "RUST_FRONTEND", rust)
    head = yaml.safe_load(interpolated(FILE.read_text()))["services"]["head"]
    assert str(head["environment"]["VLLM_USE_RUST_FRONTEND"]) == rust
    assert f"http://127.0.0.1:{port}/health" in head["healthcheck"]["test"][-1]


def test_the_user_of_the_containers_owns_the_secret_file(compose: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "deploy" / "compose.md").read_text()
    assert 'echo "USER_ID=$(id -u)"' in page
    for service in compose["services"].values():
        assert service["user"].partition(":")[0] == "1000"
        (secret,) = service["secrets"]
        assert flags_of(command(service))["--omni-secret-file"] == f"/run/secrets/{secret}"
        assert secret in compose["secrets"]


def test_only_the_node_has_gpus(compose: dict[str, Any]) -> None:
    head, node = (compose["services"][name] for name in ("head", "node"))
    assert head["environment"]["VLLM_TARGET_DEVICE"] == "cpu"
    assert "VLLM_TARGET_DEVICE" not in node["environment"]
    assert ["gpu" in str(service.get("deploy")) for service in (head, node)] == [False, True]


def test_the_build_context_has_only_what_pip_installs(compose: dict[str, Any]) -> None:
    build = compose["services"]["head"]["build"]
    folder = (FILE.parent / build["context"]).resolve()
    assert folder == ROOT
    assert (folder / build["dockerfile"]).is_file()
    ignored, *lines = (folder / f"{build['dockerfile']}.dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    wanted |= set(project["tool"]["setuptools"]["package-dir"].values())
    wanted |= {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert (ignored, sent) == ("*", wanted)


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
    services: dict[str, Any] = yaml.safe_load(interpolated(FILE.read_text()))["services"]
    for service in services.values():
        assert "entrypoint" not in service
        assert service["read_only"] is True
        assert service["user"].endswith(":0")
        # Docker mounts a tmpfs as noexec, and compiled kernels are loaded from it.
        folder, _, options = service["tmpfs"].partition(":")
        assert "exec" in options.split(",")
        assert {folder, *(volume.partition(":")[2] for volume in service["volumes"])} == WRITABLE
